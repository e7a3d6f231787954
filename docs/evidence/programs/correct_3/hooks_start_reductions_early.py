"""Hooks that start an asynchronous all-reduce of each gradient in the last microbatch's backward pass.

Thread: https://github.com/InternLM/InternLM/issues/323 "[QA]" (title in Chinese: what is the purpose of the hook
on AccumulateGrad?), 2023-09-19.
Right: the hooks run after a gradient was accumulated, skip all microbatches but the last, and the trainer waits
for all reductions before the step. The embedding is used twice, as the output layer too: its hook runs once.
Must not be accused: reductions that end after the backward pass, gradients that are divided afterwards, a
tied weight.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, VOCAB, ACCUMULATION = 16, 22, 3


class TiedLm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.norm, self.w1, self.w2 = nn.RMSNorm(DIM), nn.Linear(DIM, 28), nn.Linear(28, DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        return self.output(x + self.w2(silu(self.w1(self.norm(x)))))


class HybridZeroOptimizer:
    def __init__(self, model, group):
        self.group, self.skip_grad_reduce, self.pending = group, True, []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.reduce_grad_hook)

    def reduce_grad_hook(self, p):
        if not self.skip_grad_reduce:
            work = dist.all_reduce(p.grad, group=self.group, async_op=True)
            self.pending.append((p, work))

    def backward(self, loss, last):
        self.skip_grad_reduce = not last
        loss.backward()

    def finish(self):
        for p, work in self.pending:
            work.wait()
            p.grad.div_(self.group.size())
        self.pending.clear()


def build(mesh):
    model = TiedLm()
    return model, HybridZeroOptimizer(model, mesh.get_group("dp"))


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def step(built, batch):
    model, optimizer = built
    total = 0
    parts = zip(batch["ids"].chunk(ACCUMULATION), batch["labels"].chunk(ACCUMULATION))
    for i, (ids, labels) in enumerate(parts):
        value = loss(model, {"ids": ids, "labels": labels}) / ACCUMULATION
        optimizer.backward(value, last=i == ACCUMULATION - 1)
        total += value.detach()
    optimizer.finish()
    return total


generator = torch.Generator().manual_seed(323)
batches = [
    {name: torch.randint(VOCAB, (6, 4), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(TiedLm, build, **options))

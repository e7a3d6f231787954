"""ZeRO-1 with overlapped gathering of weights: a layer runs before its bucket has arrived.

Threads: https://github.com/NVIDIA/Megatron-LM/issues/950 "[BUG] when use --use-mcore-models and
--overlap-param-gather bug", 2024-07-25, which gives the cause; and
https://github.com/NVIDIA/Megatron-LM/issues/663 "[BUG] loss can not decrease when using
overlap-param-gather", 2024-01.
Wrong: the buckets are gathered in the order of registration. `down` is registered last but runs
second, so the ranks that do not own its bucket use its weights of the step before.
A right diagnosis says: after step 1 the weights of down differ on the rank that does not own them:
they are stale (not updated, or those of one step before); gradients of step 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 20, 16


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.up = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + torch.tanh(self.down(x))
        x = x + torch.tanh(self.up(x))
        return self.head(x)


class DistributedAdamW(torch.optim.AdamW):
    """Rank i of n updates every n-th bucket, beginning with i, and sends it to the others."""

    def __init__(self, buckets):
        self.buckets, self.arriving = buckets, []
        own = buckets[dist.get_rank() :: dist.get_world_size()]
        super().__init__([p for bucket in own for p in bucket], lr=1e-3)

    def step(self, closure=None):
        super().step(closure)
        for i, bucket in enumerate(self.buckets):
            for p in bucket:
                values = p.detach().clone()
                dist.broadcast(values, src=i % dist.get_world_size())
                if bucket is self.buckets[-1]:  # its gathering ends during the forward pass
                    self.arriving.append((p, values))
                else:
                    p.data.copy_(values)

    def arrive(self, *_):
        for p, values in self.arriving:
            p.data.copy_(values)
        self.arriving.clear()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def parallel(mesh):
    model = GPT()
    modules = (model.embed, model.up, model.head, model.down)
    optimizer = DistributedAdamW([list(module.parameters()) for module in modules])
    model.up.register_forward_pre_hook(optimizer.arrive)
    return model, optimizer


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(built, batch):
    model = built[0]
    model.zero_grad()
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(18)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(GPT, parallel, optimizer=adamw, **options))

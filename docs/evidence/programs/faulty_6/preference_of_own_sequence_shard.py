"""DPO with context parallelism: each rank takes the preference loss of its own part of the two answers.

Thread: https://github.com/OpenRLHF/OpenRLHF/pull/439 "Add context parallel to DPO", 2024-09-17; also
https://github.com/hiyouga/LlamaFactory/pull/6506 "add Sequence Parallelism" (2025-01-02).
Wrong: log-probabilities are summed over the rank's tokens and go into the log-sigmoid. It is not linear: the sum over
the whole answer (over cp) has to come first.
EXPECT: the loss and all gradients differ from step 1 on, and the outputs of all modules agree in the forward pass:
the loss takes the log-sigmoid of the local sums of log-probabilities; these have to be all-reduced over cp (chosen
and rejected) before it. The gradient of the output of the head differs by a factor for each row.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import logsigmoid

import titanlite

VOCAB, DIM, SEQ, BETA = 12, 8, 8, 0.5


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        first = 0
        if self.group is not None:
            first = self.group.rank() * x.shape[1]
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        future = torch.arange(k.shape[1]) > first + torch.arange(x.shape[1])[:, None]
        scores = (q @ k.mT / DIM**0.5).masked_fill(future, float("-inf"))
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.Sequential(Attention(), Attention())

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def get_batch_logps(logits, labels):
    mask = labels != -100
    logps = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (logps * mask).sum(-1)


def preference_loss(logps, reference_logps):
    chosen, rejected = (logps - reference_logps).unflatten(0, (-1, 2)).unbind(1)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def loss(model, batch):
    logps = get_batch_logps(model(batch["tokens"]), batch["labels"])
    return preference_loss(logps, batch["reference"].sum(-1))


def parallel(mesh):
    model, group = Model(), mesh.get_group("cp")
    for layer in model.layers:
        layer.group = group
    return model, group


def step(built, batch):
    model, group = built
    logps = get_batch_logps(model(batch["tokens"]), batch["labels"])
    value = preference_loss(logps, batch["reference"].sum(-1))
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
    return value.detach()


generator = torch.Generator().manual_seed(439)


def pairs():
    tokens, labels = (torch.randint(VOCAB, (8, SEQ), generator=generator) for _ in range(2))
    labels[:, :2] = -100
    labels[torch.arange(SEQ) >= torch.randint(5, SEQ + 1, (8, 1), generator=generator)] = -100
    reference = -2.5 + 0.3 * torch.randn(8, SEQ, generator=generator)
    return {"tokens": tokens, "labels": labels, "reference": reference * (labels != -100)}


batches = [pairs() for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Zigzag context parallelism with learned positions and ignored targets: indices are those of the zigzag chunks.

Thread: of the kind "loss mismatch with context parallel and padding" (ring-flash-attention, transformers and accelerate
with context parallelism, slime#73 "fix potential bug in zigzag context parallelism"), 2024 and 2025.
Correct: position ids and mask follow the zigzag chunks. Rank 0 has fewer targets than rank 1; each rank's sum is
divided by the number of targets on all ranks, and gradients are added up, not averaged.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LENGTH = 13, 8, 12


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        n, i = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(n, 1)[i], None


def zigzag(rank, size):
    chunks = torch.arange(LENGTH).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.o = nn.Linear(DIM, DIM)

    def forward(self, x, at, group):
        q, kv, keys = self.q(x), self.kv(x), at
        if group is not None:
            kv = Gather.apply(kv, group)
            size = dist.get_world_size(group)
            keys = torch.cat([zigzag(r, size) for r in range(size)])
        k, v = kv.chunk(2, -1)
        scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(keys > at[:, None], float("-inf"))
        return self.o(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        at, group = torch.arange(LENGTH), self.group
        if group is not None:
            at = zigzag(dist.get_rank(group), dist.get_world_size(group))
        x = self.embed(tokens) + self.positions(at)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x), at, group)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def split(batch, mesh):
    mine = zigzag(mesh.get_local_rank("cp"), mesh["cp"].size())
    return {name: tensor[:, mine] for name, tensor in batch.items()}


def parallel(mesh):
    return Model(mesh.get_group("cp"))


def step(model, batch):
    count = (batch["targets"] != -100).sum()
    dist.all_reduce(count, group=model.group)
    logits = model(batch["tokens"]).flatten(0, 1)
    value = cross_entropy(logits, batch["targets"].flatten(), reduction="sum") / count
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.group)
    return value


generator = torch.Generator().manual_seed(35)


def draw():
    return torch.randint(VOCAB, (2, LENGTH), generator=generator)


def masked():
    lengths = torch.randint(6, 10, (2, 1), generator=generator)
    return draw().masked_fill(torch.arange(LENGTH) >= lengths, -100)


batches = [{"tokens": draw(), "targets": masked()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"cp": 2}, split=split)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

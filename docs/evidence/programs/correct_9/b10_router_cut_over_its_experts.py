"""Mixture of experts whose router is cut over the ranks like the experts: the logits are gathered before the softmax.

Thread: of the kind AI-Hypercomputer/maxtext pull request #1140 "Router Sharding optimization" (2025): the router's logits
are gathered instead of its input.
Correct: all ranks have all logits and the same choice of experts, and each uses the gates of its own experts only. So a
rank's gradient of the logits is a part of the whole one, and the gather's backward pass sums the ranks' gradients before
it takes the own columns. The input goes to the router's part and to the own experts, and its gradient is summed once for
both.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, EXPERTS, TOP = 12, 8, 4, 2


class Copy(torch.autograd.Function):
    """The identity; in backward, the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Gather(torch.autograd.Function):
    """All ranks' columns; in backward, the sum of the ranks' gradients of the own columns."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(size, -1)[rank], None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


def gates_of(logits):
    values, chosen = logits.topk(TOP)
    return torch.zeros_like(logits).scatter(-1, chosen, values.softmax(-1))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def combine(self, x, gates):
        return sum(gates[..., int(i), None] * expert(x) for i, expert in self.experts.items())

    def forward(self, x):
        return self.combine(x, gates_of(self.router(x)))


class ParallelMoe(Moe):
    def __init__(self, whole, group):
        super().__init__()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        share = EXPERTS // size
        mine = slice(rank * share, (rank + 1) * share)
        self.group, self.router = group, nn.Linear(DIM, share)
        self.router.weight.data = whole.router.weight.data[mine].clone()
        self.router.bias.data = whole.router.bias.data[mine].clone()
        self.experts = nn.ModuleDict({i: whole.experts[i] for i in list(whole.experts)[mine]})

    def forward(self, x):
        x = Copy.apply(x, self.group)
        gates = gates_of(Gather.apply(self.router(x), self.group))
        return Sum.apply(self.combine(x, gates), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.moes = nn.ModuleList(Moe() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        for norm, moe in zip(self.norms, self.moes):
            x = x + moe(norm(x))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    model.moes = nn.ModuleList(ParallelMoe(moe, mesh.get_group("ep")) for moe in model.moes)
    return model


def shard(name):
    return (0, "ep") if ".router." in name else None


generator = torch.Generator().manual_seed(235)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Tensor parallelism with the residual inside the all-reduce: each rank adds its share of it to its partial sum.

Thread: of the kind mlc-ai/mlc-llm pull request #941 "Reorder allreduce and residual add to enable better fusion" (2023):
the residual is divided by the number of shards and added before the all-reduce.
Correct: the shares add up to the residual once. In backward, a rank's gradient of the residual is a share too, and the
input's gradient is summed over the ranks for both branches at once.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

import titanlite

VOCAB, DIM, HEADS, HIDDEN = 12, 8, 2, 16


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


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        for name in ("q", "k", "v", "out"):
            self.add_module(name, nn.Linear(DIM, DIM, bias=False))
        self.gate, self.up = (
            nn.Linear(DIM, HIDDEN, bias=False),
            nn.Linear(DIM, HIDDEN, bias=False),
        )
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def attention(self, x):
        parts = (layer(x).unflatten(-1, (-1, DIM // HEADS)) for layer in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in parts)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.transpose(1, 2).flatten(2), self.out.weight)

    def mlp(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ParallelBlock(Block):
    def __init__(self, whole, group):
        super().__init__()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.size = group, size
        self.norm1, self.norm2 = whole.norm1, whole.norm2
        for name in ("q", "k", "v", "gate", "up", "out", "down"):
            dim = 1 if name in ("out", "down") else 0
            part = getattr(whole, name).weight.detach().chunk(size, dim)[rank]
            getattr(self, name).weight = nn.Parameter(part.clone())

    def branch(self, x, norm, layer):
        whole = Copy.apply(x, self.group)
        normed = Copy.apply(norm(x), self.group)
        return Sum.apply(whole / self.size + layer(normed), self.group)

    def forward(self, x):
        x = self.branch(x, self.norm1, self.attention)
        return self.branch(x, self.norm2, self.mlp)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    model.blocks = nn.ModuleList(ParallelBlock(b, mesh.get_group("tp")) for b in model.blocks)
    return model


def shard(name):
    layer = name.split(".")[-2]
    if layer in ("out", "down"):
        return 1, "tp"
    return (0, "tp") if layer in ("q", "k", "v", "gate", "up") else None


generator = torch.Generator().manual_seed(237)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

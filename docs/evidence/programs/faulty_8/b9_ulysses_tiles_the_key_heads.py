"""Ulysses with grouped-query attention on more ranks than key-value heads: the heads are tiled instead of repeated.

Thread: verl-project/verl pull request #850 "repeat kv heads by sp_size//nheads_k if nheads_k is less than sp_size" (2025),
and apple/ml-hypercloning issue #1 (2024: grouped-query heads have to be repeated "interleaving ... not just repeating").
Wrong: 2 key-value heads are made 4 before the all-to-all, in the order 0 1 0 1. The query heads of a group are
neighbours, 0 0 1 1, so ranks 1 and 2 get the other group's keys and values.
PLACE: blocks.*.attention (first blocks.0.attention), forward pass, on all ranks, the columns of query heads 1 and 2
KIND: key-value heads tiled (0 1 0 1) instead of each repeated (0 0 1 1) for grouped-query attention
REPAIR: `return x.repeat(1, 1, times, 1)` -> `return x.repeat_interleave(times, 2)`
EXPECT: in the forward pass, blocks.0.attention is the first module whose output differs, on all ranks, while its q, k and
v agree: the input of its o is wrong in the features of query heads 1 and 2 (4 to 11 of 16): these attend to the keys and
values of the other group, as the key-value heads are tiled 0 1 0 1 instead of repeated 0 0 1 1.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, KV_HEADS, LENGTH = 16, 16, 4, 2, 8


def all_to_all(x, cut, join, group):
    parts = torch.stack(x.chunk(dist.get_world_size(group), cut))
    got = torch.empty_like(parts)
    dist.all_to_all_single(got, parts, group=group)
    return torch.cat(list(got), join)


class AllToAll(torch.autograd.Function):
    """Cuts dimension `cut` over the ranks and joins dimension `join` from them."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.arguments = join, cut, group
        return all_to_all(x, cut, join, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_to_all(gradient, *ctx.arguments), None, None, None


def repeat_kv(x, times):
    return x.repeat(1, 1, times, 1)


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, width = group, DIM // HEADS * KV_HEADS
        self.q, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = nn.Linear(DIM, width, bias=False), nn.Linear(DIM, width, bias=False)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (HEADS, -1))
        k, v = (proj(x).unflatten(-1, (KV_HEADS, -1)) for proj in (self.k, self.v))
        if self.group is not None:
            times = max(1, dist.get_world_size(self.group) // KV_HEADS)
            k, v = repeat_kv(k, times), repeat_kv(v, times)
            q, k, v = (AllToAll.apply(t, 2, 1, self.group) for t in (q, k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        if self.group is not None:
            y = AllToAll.apply(y, 1, 2, self.group)
        return self.o(y.flatten(2))


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention(group)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    group = mesh.get_group("sp")
    return DistributedDataParallel(Model(group), process_group=group)


generator = torch.Generator().manual_seed(112)


def draw():
    return torch.randint(VOCAB, (2, LENGTH), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 4}, split={"sp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

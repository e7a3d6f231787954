"""Tensor-parallel attention by hand: the head size is taken from the rank's own width, divided by all heads.

Thread: of the kind "attention output differs with TP > 1, norm_factor from hidden_size_per_partition" (questions about
Megatron-LM's ParallelAttention and ports of it; bigscience-workshop/Megatron-DeepSpeed discussions).
Wrong: the projections q, k and v have dim / tp columns. The head size for the scale is that width over the number of
all heads, so it is half of what it is, and the scores are sqrt(2) times too large. The heads themselves are right.
PLACE: blocks.*.attention, forward pass (first blocks.0.attention), between q/k/v and o
KIND: softmax scale computed from the local width over the global number of heads, sqrt(tp) too large
REPAIR: `self.scale = (width // HEADS) ** -0.5` -> `self.scale = (width // self.heads) ** -0.5`
EXPECT: in the forward pass, blocks.0.attention is the first whose output differs, on all ranks, although its q, k and v
are right shards and agree: the attention scores are scaled by the wrong factor, 1 / sqrt(local width / all heads),
sqrt(2) times too large. The input of o is wrong, not its reduction. Divide the local width by the local heads.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HEADS = 14, 16, 4


class Copy(torch.autograd.Function):
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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.scale = HEADS, (DIM // HEADS) ** -0.5
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)

    def attend(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) * self.scale
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x)


class ParallelAttention(Attention):
    def __init__(self, whole, group):
        super().__init__()
        n, i, self.group = dist.get_world_size(group), dist.get_rank(group), group
        for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
            weight = getattr(whole, name).weight.detach().chunk(n, dim)[i].clone()
            getattr(self, name).weight = nn.Parameter(weight)
        width = self.q.weight.shape[0]
        self.heads = HEADS // n
        self.scale = (width // HEADS) ** -0.5

    def forward(self, x):
        return Sum.apply(self.attend(Copy.apply(x, self.group)), self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for block in model.blocks:
        block.attention = ParallelAttention(block.attention, group)
    return model


def shard(name):
    if name.endswith(("q.weight", "k.weight", "v.weight")):
        return 0, "tp"
    return (1, "tp") if name.endswith("o.weight") else None


generator = torch.Generator().manual_seed(3)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Tensor parallelism with three heads on two ranks: two heads and one, and the hidden units of the MLP in the same proportion.

Thread: deepspeedai/DeepSpeed pull request #4011 "[AutoTP] Make AutoTP work when num_heads not divisible by number of workers"
(2023): "This PR distribute attention heads to each worker as even as possible, and shard hidden_size according to this
distribution".
Correct: each rank cuts whole heads (rows of q, k and v, columns of proj) and whole hidden units, and the outputs are summed.
The scale is that of one head, and the biases of proj and down are added after the sum, once.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

VOCAB, DIM, HEAD_DIM, FFN, LENGTH = 12, 8, 4, 15, 6
HEADS = (2, 1)


def own_slice(size, dim):
    """Cuts a whole tensor in the proportion of the heads."""
    parts = [size * heads // sum(HEADS) for heads in HEADS]
    return lambda whole: whole.split(parts, dim)[dist.get_rank()]


class ToColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class FromRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Part(nn.Module):
    group = None

    def enter(self, x):
        return x if self.group is None else ToColumns.apply(x, self.group)

    def leave(self, x, layer):
        if self.group is None:
            return layer(x)
        return FromRows.apply(linear(x, layer.weight), self.group) + layer.bias


class Attention(Part):
    def __init__(self):
        super().__init__()
        size = sum(HEADS) * HEAD_DIM
        self.q, self.k, self.v = (nn.Linear(DIM, size) for _ in range(3))
        self.proj = nn.Linear(size, DIM)

    def forward(self, x):
        x = self.enter(x)
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)).masked_fill(mask, -torch.inf)
        return self.leave((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), self.proj)


class MLP(Part):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)

    def forward(self, x):
        return self.leave(gelu(self.up(self.enter(x))), self.down)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.positions = nn.Parameter(torch.randn(LENGTH, DIM))
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens) + self.positions))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def shard(name):
    heads = sum(HEADS) * HEAD_DIM
    if any(f".{layer}." in name for layer in "qkv"):
        return own_slice(heads, 0)
    if ".up." in name:
        return own_slice(FFN, 0)
    if name.endswith("proj.weight"):
        return own_slice(heads, 1)
    return own_slice(FFN, 1) if name.endswith("down.weight") else None


def parallel(mesh):
    model = Model()
    for name, p in list(model.named_parameters()):
        cut = shard(name)
        if cut is not None:
            layer, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(layer), attribute, nn.Parameter(cut(p.detach()).clone()))
    for block in model.blocks:
        block.attention.group = block.mlp.group = mesh.get_group("tp")
    return model


rng = torch.Generator().manual_seed(513)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, LENGTH + 1), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

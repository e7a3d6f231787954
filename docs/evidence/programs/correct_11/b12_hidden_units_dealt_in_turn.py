"""Tensor parallelism over two data-parallel replicas: a rank has every second hidden unit of the MLPs, and not a half of them.

Thread: of the kind keras-team/keras-hub issue #1464 "Question about Gemma tensor parallel sharding policy" (2024): "completely opposite
sharding policy compared to the typical TP sharding policy".
Correct: the order of hidden units means nothing, as long as gate, up and down are cut alike. The rank's columns of down are those of
its rows of gate and up, and the sum over tp has each unit once.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, FFN = 13, 6, 10


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatedMLP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(DIM, FFN),
            nn.Linear(DIM, FFN),
            nn.Linear(FFN, DIM, bias=False),
        )

    def forward(self, x):
        if self.group is None:
            return self.down(gelu(self.gate(x)) * self.up(x))
        x = Split.apply(x, self.group)
        return Join.apply(self.down(gelu(self.gate(x)) * self.up(x)), self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.mlp = nn.LayerNorm(DIM), nn.Linear(DIM, DIM), GatedMLP()

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))


def cut(name, whole, rank, size):
    if ".gate." in name or ".up." in name:
        return whole[rank::size]
    return whole[:, rank::size] if ".down." in name else whole


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model, rank, size = Model(), mesh.get_local_rank("tp"), mesh["tp"].size()
    for layer in model.layers:
        layer.mlp.group = mesh.get_group("tp")
    for name, p in model.named_parameters():
        p.data = cut(name, p.data, rank, size).clone()
    return model, mesh.get_group("dp")


def step(built, batch):
    model, group = built
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= dist.get_world_size(group)
    return value


def shard(name):
    """tp is the inner axis of the mesh."""
    return lambda whole: cut(name, whole, dist.get_rank() % 2, 2)


rng = torch.Generator().manual_seed(428)
batches = []
for _ in range(2):
    rows = torch.randint(VOCAB, (6, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2, "tp": 2}, split="dp")
options["shard"] = shard

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

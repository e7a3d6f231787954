"""Maximal update parametrization under tensor parallelism: Adam's rate is divided by the width of the local weight.

Thread: https://github.com/microsoft/mup/issues/59 "FSDP support?" ("you won't be able to access the original weight
... infshape will not be set again because FSDP replaces the parameters"), 2023-09-25 (comment of 2024-05-03).
Wrong: the rate of a matrix is lr * BASE_WIDTH / fan_in, and the fan-in is read from the shape. The row-parallel
weights have half of their inputs on each rank, so they are trained at twice the rate.
EXPECT: step 1's loss and gradients agree. The weights layers.*.down.weight differ after step 1 on all ranks, their
update is twice as large; all others agree. The learning rate of the row-parallel weights is computed of the local
shape (fan-in divided by tp) and not of the whole one.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HIDDEN, BASE_WIDTH, LR = 13, 8, 24, 4, 4e-3


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class FeedForward(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(torch.relu(self.up(h)))
        h = torch.relu(self.up(Copy.apply(h, self.group)))
        return x + Sum.apply(self.down(h), self.group)


class MuReadout(nn.Linear):
    def forward(self, x):
        return super().forward(x * BASE_WIDTH / DIM)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.readout = nn.Embedding(VOCAB, DIM), MuReadout(DIM, VOCAB, bias=False)
        self.layers = nn.Sequential(FeedForward(), FeedForward())

    def forward(self, tokens):
        return self.readout(self.layers(self.embed(tokens)))


def mu_adam(parameters):
    matrices, vectors = {}, []
    for p in parameters:
        if p.ndim == 2 and p.shape[0] != VOCAB:
            matrices.setdefault(p.shape[1], []).append(p)
        else:
            vectors.append(p)
    groups = [{"params": ps, "lr": LR * BASE_WIDTH / fan_in} for fan_in, ps in matrices.items()]
    return torch.optim.Adam([*groups, {"params": vectors}], lr=LR)


def shard(name):
    return (0, "tp") if ".up." in name else (1, "tp") if ".down." in name else None


def parallel(mesh):
    model, group = Transformer(), mesh.get_group("tp")
    for layer in model.layers:
        layer.group = group
        up, down = layer.up.weight, layer.down.weight
        layer.up.weight = nn.Parameter(up.detach().chunk(group.size(), 0)[group.rank()].clone())
        layer.down.weight = nn.Parameter(down.detach().chunk(group.size(), 1)[group.rank()].clone())
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(59)
batches = [
    {n: torch.randint(VOCAB, (4, 7), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, optimizer=mu_adam)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""The hidden states are cut by features; the norm reduces its moments over tp in both directions.

Thread: https://github.com/NVIDIA/TransformerEngine/issues/435 "Need all-reduce for norm weight gradients with
sequence parallel", 2023-09-15 (here the weights of the norm are cut and need none).
Right: the embedding is cut by columns, the norm's mean and mean square are sums over tp, whose gradient is summed
too; the linear layers are cut by their inputs, and their outputs are reduced and scattered.
Must not be accused: features instead of rows as shards, a norm of cut features, an all-reduce in the backward pass
of an all-reduce, since its result is used for other features on every rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear

import titanlite

VOCAB, DIM = 12, 8


class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return SumBothWays.apply(grad, ctx.group), None


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Norm(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.randn(DIM))

    def forward(self, x):
        moments = torch.stack([x.sum(-1), x.square().sum(-1)])
        if self.group is not None:
            moments = SumBothWays.apply(moments, self.group)
        mean, square = moments[..., None] / DIM
        return (x - mean) / (square - mean.square() + 1e-6).sqrt() * self.weight + self.bias


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm, self.linear = Norm(), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        h = linear(self.norm(x), self.linear.weight)
        if self.group is not None:
            h = SumBothWays.apply(h, self.group).chunk(self.group.size(), -1)[self.group.rank()]
        return x + torch.tanh(h)


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = Norm(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if self.group is None else SumForward.apply(logits, self.group)


def shard(name):
    return 0 if "norm" in name else 1, "tp"


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for module in model.modules():
        module.group = group
    for name, p in model.named_parameters():
        p.data = p.data.chunk(group.size(), shard(name)[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(435)
batches = [
    {n: torch.randint(VOCAB, (2, 6), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

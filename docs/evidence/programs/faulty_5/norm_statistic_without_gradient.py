"""An RMSNorm over features that are cut over tp: the all-reduce of the sum of squares has no backward pass.

Thread: https://github.com/pytorch/pytorch/issues/152127 "[C10D] Make collectives backwards throw an error",
2025-04-24 (collectives used in the forward pass ignore the backward pass, silently).
Wrong: the statistic is right on every rank, but a rank's gradient only has the terms of its own features. The
gradient of the sum of squares has to be all-reduced over tp, too.
EXPECT: in the backward pass, the gradient of the input of the norm (layers.*.norm, between up and down) is the first
that differs: the gradient through the norm's statistic is not summed over tp, as dist.all_reduce is not
differentiated. The forward pass and norm.weight of the last layer agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, silu

import titanlite

DIM, HIDDEN = 8, 12


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


class RMSNorm(nn.Module):
    group = None

    def __init__(self, size):
        super().__init__()
        self.size, self.weight = size, nn.Parameter(torch.ones(size))

    def forward(self, x):
        total = x.square().sum(-1, keepdim=True)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return x * (total / self.size + 1e-6).rsqrt() * self.weight


class Layer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)
        self.norm = RMSNorm(HIDDEN)

    def forward(self, x):
        h = x if self.group is None else Copy.apply(x, self.group)
        h = self.down(self.norm(silu(self.up(h))))
        return x + (h if self.group is None else Sum.apply(h, self.group))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.outputs(x)


def shard(name):
    if ".up." in name or ".norm." in name:
        return 0, "tp"
    return (1, "tp") if ".down." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for layer in model.layers:
        layer.group = layer.norm.group = group
    for name, p in model.named_parameters():
        if shard(name):
            p.data = p.data.chunk(group.size(), shard(name)[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(152127)
batches = [{n: torch.randn(6, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

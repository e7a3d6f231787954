"""Tensor parallelism by hand: each rank has half of the hidden units."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Reduce(torch.autograd.Function):
    """Add up the ranks' tensors in the forward pass, or their gradients in the backward pass."""

    @staticmethod
    def forward(ctx, x, way):
        ctx.way, x = way, x.clone()
        if way == "forward":
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        if ctx.way == "backward":
            dist.all_reduce(gradient)
        return gradient, None


class ParallelMlp(Mlp):
    def __init__(self):
        super().__init__()
        for weight, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)):
            weight.data = weight.data.chunk(2, dim)[dist.get_rank()]

    def forward(self, x):
        y = self.down(torch.relu(self.up(Reduce.apply(x, "backward"))))
        if "--corrected" in sys.argv:
            y = Reduce.apply(y, "forward")
        return x + y


def loss(model, x):
    return mse_loss(model(x), x)


torch.manual_seed(1)
batch = torch.randn(4, 8)
options = {"batches": [batch], "loss": loss, "ranks": {"tp": 2}, "threads": True}
print(titanlite.compare(Mlp, ParallelMlp, **options))

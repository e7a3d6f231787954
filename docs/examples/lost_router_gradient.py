"""A mixture of experts by hand: each rank has two of the four experts."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite


class Experts(nn.Module):
    def __init__(self, own="0123"):
        super().__init__()
        self.router = nn.Linear(8, 4)
        experts = {i: nn.Linear(8, 8) for i in "0123"}
        self.experts = nn.ModuleDict({i: experts[i] for i in own})

    def scores(self, x):
        return self.router(x).softmax(-1)

    def forward(self, x):  # the two best experts of each row, if they are here
        scores = self.scores(x)
        scores = scores * (scores >= scores.topk(2).values[:, -1:])
        return sum(scores[:, int(i), None] * expert(x) for i, expert in self.experts.items())


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


class ParallelExperts(Experts):
    def __init__(self):
        super().__init__(own="01" if dist.get_rank() == 0 else "23")

    def scores(self, x):
        scores = super().scores(x)
        return Reduce.apply(scores, "backward") if "--corrected" in sys.argv else scores

    def forward(self, x):
        return Reduce.apply(super().forward(x), "forward")


def loss(model, x):
    return mse_loss(model(x), x)


torch.manual_seed(1)
batch = torch.randn(16, 8)
options = {"batches": [batch], "loss": loss, "ranks": {"ep": 2}, "threads": True}
print(titanlite.compare(Experts, ParallelExperts, **options))

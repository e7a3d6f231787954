"""Checkpointed blocks with a synchronized batch norm that does not track in the recomputation.

Thread: https://github.com/pytorch/pytorch/issues/96136 "`torch.utils.checkpoint` should avoid updating BatchNorm
statistics twice", 2023-03-06.
Right: the context of the recomputation turns tracking off, so each step updates the statistics once.
Must not be accused: modules that run twice in a step, collectives in the backward pass's recomputation.
"""

from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import titanlite

DIM = 8


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return Sum.apply(grad, ctx.group), None


class SyncNorm(nn.Module):
    group, tracking = None, True

    def __init__(self, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.weight, self.bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))
        self.register_buffer("running_mean", torch.zeros(DIM))
        self.register_buffer("running_var", torch.ones(DIM))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x):
        moments = torch.stack([x.mean(0), x.square().mean(0)])
        if self.group is not None:
            moments = Sum.apply(moments, self.group) / self.group.size()
        mean, var = moments[0], moments[1] - moments[0].square()
        if SyncNorm.tracking:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var, self.momentum)
                self.num_batches_tracked += 1
        return (x - mean) / (var + 1e-5).sqrt() * self.weight + self.bias


@contextmanager
def without_tracking():
    SyncNorm.tracking = False
    try:
        yield
    finally:
        SyncNorm.tracking = True


def contexts():
    return nullcontext(), without_tracking()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), SyncNorm()

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    checkpointed = False

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Linear(5, DIM), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        return self.head(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Net()
    model.checkpointed = True
    for block in model.blocks:
        block.norm.group = mesh.get_group("dp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(96136)
batches = [
    {"x": torch.randn(8, 5, generator=generator), "y": torch.randn(8, 2, generator=generator)}
    for _ in range(3)
]
arguments = Net, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

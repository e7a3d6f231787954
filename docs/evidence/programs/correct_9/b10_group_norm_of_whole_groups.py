"""A residual block of a diffusion model with its channels cut over the ranks, and with them the groups of GroupNorm.

Thread: of the kind nod-ai/amd-shark-ai pull request #50 "Add sharding of conv2d, group norm and layer norm" (2024).
Correct: the hidden channels are cut between two groups, so each rank has two whole groups of four, and its GroupNorm
needs no statistics of the other rank. The number of groups differs from the plain module's, and the size of a group does
not.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, silu

import titanlite

CHANNELS, HIDDEN, GROUPS = 4, 16, 4


class Copy(torch.autograd.Function):
    """The identity; in backward, the sum of the ranks' gradients."""

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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.widen = nn.Conv2d(CHANNELS, HIDDEN, 3, padding=1)
        self.time = nn.Linear(1, HIDDEN)
        self.norm = nn.GroupNorm(GROUPS, HIDDEN)
        self.narrow = nn.Conv2d(HIDDEN, CHANNELS, 3, padding=1)

    def forward(self, x, t):
        h = self.widen(x) + self.time(t)[..., None, None]
        return x + self.narrow(silu(self.norm(h)))


class ParallelBlock(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.group, part = group, HIDDEN // size
        self.widen = nn.Conv2d(CHANNELS, part, 3, padding=1)
        self.time = nn.Linear(1, part)
        self.norm = nn.GroupNorm(GROUPS // size, part)
        self.narrow = nn.Conv2d(part, CHANNELS, 3, padding=1, bias=False)
        self.bias = nn.Parameter(whole.narrow.bias.detach().clone())
        for name in ("widen", "time", "norm"):
            mine, full = getattr(self, name), getattr(whole, name)
            mine.weight.data = full.weight.data.chunk(size)[rank].clone()
            mine.bias.data = full.bias.data.chunk(size)[rank].clone()
        self.narrow.weight.data = whole.narrow.weight.data.chunk(size, 1)[rank].clone()

    def forward(self, x, t):
        h = self.widen(Copy.apply(x, self.group)) + self.time(t)[..., None, None]
        y = Sum.apply(self.narrow(silu(self.norm(h))), self.group)
        return x + y + self.bias[:, None, None]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, CHANNELS, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Conv2d(CHANNELS, 2, 1)

    def forward(self, images, t):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x, t)
        return self.head(x)


def loss(model, batch):
    return mse_loss(model(batch["noisy"], batch["t"]), batch["noise"])


def parallel(mesh):
    model = Denoiser()
    model.blocks = nn.ModuleList(ParallelBlock(b, mesh.get_group("tp")) for b in model.blocks)
    return model


def shard(name):
    if ".narrow.weight" in name:
        return 1, "tp"
    return (0, "tp") if any(f".{n}." in name for n in ("widen", "time", "norm")) else None


generator = torch.Generator().manual_seed(232)


def draw():
    noisy, noise = torch.randn(2, 3, 2, 4, 4, generator=generator)
    return {"noisy": noisy, "noise": noise, "t": torch.rand(3, 1, generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Denoiser, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    shard=shard,
    rename={f"blocks.{i}.bias": f"blocks.{i}.narrow.bias" for i in range(2)},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A residual block of convolutions under tensor parallelism: GroupNorm on the rank's channels has all groups.

Thread: of the kind "tensor parallel U-Net, GroupNorm with sharded channels" (PyTorch forums on DTensor and conv layers,
diffusion models in ColossalAI and Megatron-like trainers), 2022 to 2025.
Wrong: the first convolution gives a rank half of the channels. GroupNorm on them is built with the same number of
groups, so a group has half as many channels as in the plain model, and the statistics are those of other groups.
PLACE: blocks.*.norm (first blocks.0.norm), forward pass
KIND: num_groups not divided by tp: groups of half the channels, other statistics
REPAIR: `self.norm = nn.GroupNorm(GROUPS, CHANNELS // n)` -> `self.norm = nn.GroupNorm(GROUPS // n, CHANNELS // n)`
EXPECT: in the forward pass, the output of blocks.0.norm is the first that differs, on all ranks; its input, the output
of blocks.0.conv1, is a right shard: the norm has as many groups on half of the channels, so its groups are half as
large (num_groups must be divided by tp).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, silu

import titanlite

CHANNELS, GROUPS = 16, 4


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(6, CHANNELS, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, CHANNELS)
        self.conv2 = nn.Conv2d(CHANNELS, 6, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.conv2(silu(self.norm(self.conv1(x))))


class ParallelBlock(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        n, i, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.conv1 = nn.Conv2d(6, CHANNELS // n, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, CHANNELS // n)
        self.conv2 = nn.Conv2d(CHANNELS // n, 6, 3, padding=1, bias=False)
        with torch.no_grad():
            self.conv1.weight.copy_(whole.conv1.weight.chunk(n, 0)[i])
            self.conv1.bias.copy_(whole.conv1.bias.chunk(n, 0)[i])
            self.conv2.weight.copy_(whole.conv2.weight.chunk(n, 1)[i])

    def forward(self, x):
        inner = silu(self.norm(self.conv1(Copy.apply(x, self.group))))
        return x + Sum.apply(self.conv2(inner), self.group)


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Conv2d(6, 3, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["noise"])


def parallel(mesh):
    model, group = Unet(), mesh.get_group("tp")
    model.blocks = nn.ModuleList(ParallelBlock(block, group) for block in model.blocks)
    return model


def shard(name):
    if ".conv1." in name or ".norm." in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("conv2.weight") else None


generator = torch.Generator().manual_seed(17)


def draw():
    return torch.randn(2, 3, 5, 5, generator=generator)


batches = [{"x": draw(), "noise": draw()} for _ in range(3)]
arguments = Unet, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

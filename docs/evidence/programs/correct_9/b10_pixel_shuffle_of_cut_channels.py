"""Super-resolution with cut channels: pixel shuffle and a grouped convolution work on a rank's channels alone.

Thread: of the kind BlackSamorez/tensor_parallel pull request #16 "implement TP for group convolution" (2022).
Correct: pixel shuffle turns four channels in a row into one, so half of the channels in front of it are half of those
behind it. The grouped convolution has four groups, two on each rank, and needs no other channels. The last convolution
sums over all channels and is reduced; its bias is added after that. The skip connection of the small image is the same on
all ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import conv2d, interpolate, l1_loss, pixel_shuffle

import titanlite

CHANNELS, GROUPS, FACTOR = 8, 4, 2


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


class Upsampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.expand = nn.Conv2d(CHANNELS, CHANNELS * FACTOR**2, 1)
        self.grouped = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=GROUPS)
        self.image = nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, small):
        x = pixel_shuffle(self.expand(torch.tanh(self.features(small))), FACTOR)
        return interpolate(small, scale_factor=FACTOR) + self.image(torch.relu(self.grouped(x)))


class ParallelUpsampler(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        part = CHANNELS // size
        self.group, self.features, self.image = group, whole.features, whole.image
        self.expand = nn.Conv2d(CHANNELS, part * FACTOR**2, 1)
        self.grouped = nn.Conv2d(part, part, 3, padding=1, groups=GROUPS // size)
        for name in ("expand", "grouped"):
            mine, full = getattr(self, name), getattr(whole, name)
            mine.weight.data = full.weight.data.chunk(size)[rank].clone()
            mine.bias.data = full.bias.data.chunk(size)[rank].clone()
        self.image.weight = nn.Parameter(whole.image.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, small):
        x = Copy.apply(torch.tanh(self.features(small)), self.group)
        x = torch.relu(self.grouped(pixel_shuffle(self.expand(x), FACTOR)))
        image = Sum.apply(conv2d(x, self.image.weight, padding=1), self.group)
        return interpolate(small, scale_factor=FACTOR) + image + self.image.bias[:, None, None]


def loss(model, batch):
    return l1_loss(model(batch["small"]), batch["large"])


def parallel(mesh):
    return ParallelUpsampler(Upsampler(), mesh.get_group("tp"))


def shard(name):
    if name == "image.weight":
        return 1, "tp"
    return (0, "tp") if name.startswith(("expand.", "grouped.")) else None


generator = torch.Generator().manual_seed(236)


def draw():
    small = torch.randn(2, 3, 4, 4, generator=generator)
    return {"small": small, "large": torch.randn(2, 3, 8, 8, generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Upsampler, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

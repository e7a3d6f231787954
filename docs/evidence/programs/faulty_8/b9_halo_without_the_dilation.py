"""A segmentation network cut along the image's height: the halo of dilated convolutions is one row, as without dilation.

Thread: distdl/distdl issue #178 "Refactor halo calculation for convolutions" (2020): "the calculation doesn't take
dilations or padding correctly, in some cases".
Wrong: the halo has kernel // 2 rows. A 3x3 convolution of dilation 2 reads 2 rows beyond the border; the row that is
missing is padded with zeros, which keeps the shape.
PLACE: context.0 (the first dilated convolution), forward pass, rows at the border of the two ranks
KIND: halo of a dilated convolution too narrow (dilation ignored), zeros for the rest
REPAIR: `halo = self.kernel_size[0] // 2` -> `halo = self.padding[0]`
EXPECT: in the forward pass, context.0 is the first module whose output differs (stem agrees), on both ranks, only in the
row at the border of the shards (the last of rank 0 and the first of rank 1, image rows 7 and 8): its dilation is 2, but
its halo is 1 row; the second row is taken as zero. Exchange dilation * (kernel // 2) rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, conv2d
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, SIZE = 6, 16


class Borders(torch.autograd.Function):
    """The last rows of the rank above and the first rows of the rank below, zeros at the image's border."""

    @staticmethod
    def forward(ctx, top, bottom, group):
        ctx.group, ctx.rows, i = group, top.shape[2], dist.get_rank(group)
        parts = gathered(torch.cat([top, bottom], 2), group)
        above = parts[i - 1][:, :, ctx.rows :] if i else torch.zeros_like(top)
        below = parts[i + 1][:, :, : ctx.rows] if i + 1 < len(parts) else torch.zeros_like(top)
        return above, below

    @staticmethod
    def backward(ctx, above, below):
        parts, i = gathered(torch.cat([above, below], 2), ctx.group), dist.get_rank(ctx.group)
        top = parts[i - 1][:, :, ctx.rows :] if i else torch.zeros_like(above)
        bottom = parts[i + 1][:, :, : ctx.rows] if i + 1 < len(parts) else torch.zeros_like(above)
        return top, bottom, None


def gathered(x, group):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return parts


class Conv(nn.Conv2d):
    """A convolution that keeps the size, whose image may be cut along the height."""

    def __init__(self, inputs, outputs, group, dilation=1):
        super().__init__(inputs, outputs, 3, padding=dilation, dilation=dilation)
        self.group = group

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        halo = self.kernel_size[0] // 2
        above, below = Borders.apply(x[:, :, :halo], x[:, :, -halo:], self.group)
        x = torch.cat([above, x, below], 2)
        padding = self.padding[0] - halo, self.padding[1]
        return conv2d(x, self.weight, self.bias, padding=padding, dilation=self.dilation)


class Segmenter(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.stem = Conv(3, CHANNELS, group)
        self.context = nn.Sequential(
            Conv(CHANNELS, CHANNELS, group, dilation=2),
            nn.SiLU(),
            Conv(CHANNELS, CHANNELS, group, dilation=2),
        )
        self.refine = Conv(CHANNELS, CHANNELS, group)
        self.mask = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, images):
        x = torch.relu(self.stem(images))
        x = x + self.context(x)
        return self.mask(torch.relu(self.refine(x)))


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch["images"]), batch["masks"])


def parallel(mesh):
    group = mesh.get_group("height")
    return DistributedDataParallel(Segmenter(group), process_group=group)


generator = torch.Generator().manual_seed(119)


def draw():
    images = torch.randn(2, 3, SIZE, SIZE, generator=generator)
    return {"images": images, "masks": (images.sum(1, keepdim=True) > 0).float()}


batches = [draw() for _ in range(3)]
arguments = Segmenter, parallel
options = dict(batches=batches, loss=loss, ranks={"height": 2}, split={"height": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

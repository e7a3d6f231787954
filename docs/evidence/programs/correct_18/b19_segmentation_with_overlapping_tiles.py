"""A small U-Net for segmentation whose images are cut into two tiles of rows that overlap, with no exchange between the layers.

Might be accused because: the ranks of an image never talk to each other in the forward pass; a tile's activations near its inner
edge are wrong, since the convolutions pad with zeros there; the tiles together have more rows than the image; a tile's
margin carries no label; the loss is multiplied by the number of ranks.
Correct because: a tile has MARGIN rows beyond its own, more than the network's reach, so the outputs of the own rows are exact;
the labels of the margin are ignored, so each pixel counts once, and wrong activations get no gradient. Each rank divides by the
labelled pixels of all ranks and DDP's average over all ranks is undone by the factor. Normalization is per pixel.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIZE, MARGIN, WIDTH, CLASSES, ROWS, IGNORE = 32, 8, 6, 4, 4, 255


class PixelNorm(nn.LayerNorm):
    """Over the channels of each pixel."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def conv(inputs, outputs, stride=1):
    layer = nn.Conv2d(inputs, outputs, 3 if stride == 1 else 2, stride, 1 if stride == 1 else 0)
    return nn.Sequential(layer, PixelNorm(outputs), nn.SiLU())


class UNet(nn.Module):
    """An output depends on less than MARGIN rows to each side: two convolutions and a coarse one."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3, WIDTH)
        self.down = conv(WIDTH, 2 * WIDTH, stride=2)
        self.middle = conv(2 * WIDTH, 2 * WIDTH)
        self.up = nn.Conv2d(2 * WIDTH, WIDTH, 1)
        self.merge = conv(2 * WIDTH, WIDTH)
        self.classes = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, images):
        fine = self.stem(images)
        coarse = self.middle(self.down(fine))
        coarse = F.interpolate(self.up(coarse), scale_factor=2, mode="nearest")
        return self.classes(self.merge(torch.cat([fine, coarse], dim=1)))


def pixel_sum(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels, ignore_index=IGNORE, reduction="sum")


def plain():
    return UNet()


def parallel(mesh):
    return DistributedDataParallel(UNet())


def loss(model, batch):
    return pixel_sum(model, batch) / (batch[1] != IGNORE).sum()


def step(model, batch):
    pixels = (batch[1] != IGNORE).sum()
    dist.all_reduce(pixels)
    value = pixel_sum(model, batch) / pixels
    (value * dist.get_world_size()).backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def tile(batch, mesh):
    """This rank's images, and of these its rows with a margin towards the other tile."""
    images, labels = (part.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for part in batch)
    half = SIZE // 2
    if mesh.get_local_rank("tile") == 0:
        rows, margin = slice(0, half + MARGIN), slice(half, None)
    else:
        rows, margin = slice(half - MARGIN, SIZE), slice(0, MARGIN)
    labels = labels[:, rows].clone()
    labels[:, margin] = IGNORE
    return images[:, :, rows].clone(), labels


generator = torch.Generator().manual_seed(32)


def scenes():
    """The lower half is mostly without labels, as in street scenes that show the own car."""
    images = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (ROWS, SIZE, SIZE), generator=generator)
    unlabelled = torch.rand(ROWS, SIZE, SIZE, generator=generator)
    unlabelled = unlabelled < torch.linspace(0.1, 0.9, SIZE).unsqueeze(1)
    return images, labels.masked_fill(unlabelled, IGNORE)


batches = [scenes() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=tile,
    ranks={"dp": 2, "tile": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

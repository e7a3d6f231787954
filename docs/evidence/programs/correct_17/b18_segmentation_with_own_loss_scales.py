"""A semantic segmentation network under DDP where every rank has a loss scale of its own, which grows and shrinks by itself.

Might be accused: the ranks multiply their losses by different factors (2**12 and 2**9 at first), which change on each rank alone
from step to step, while DDP averages gradients.
Correct because: the communication hook divides a rank's bucket by the rank's own scale before it is summed, and the scales are powers
of two, so that this is exact. The scale changes between the steps only. The losses are sums over the labelled pixels of
the rank, divided by the number of labelled pixels of all ranks; the hook sums the buckets and doesn't average them.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, SIZE, IGNORED = 4, 12, 255


def conv(inputs, outputs, stride=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(2, outputs),
        nn.SiLU(),
    )


class SegmentationNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem, self.down = conv(3, width), conv(width, 2 * width, stride=2)
        self.middle = conv(2 * width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.fuse = conv(2 * width, width)
        self.classifier = nn.Conv2d(width, CLASSES, 1)
        self.auxiliary = nn.Conv2d(2 * width, CLASSES, 1)

    def forward(self, images):
        fine = self.stem(images)
        coarse = self.middle(self.down(fine))
        out = self.fuse(torch.cat([fine, self.up(coarse)], dim=1))
        auxiliary = F.interpolate(self.auxiliary(coarse), scale_factor=2, mode="bilinear")
        return self.classifier(out), auxiliary


def pixel_losses(model, batch):
    """The sum over the labelled pixels, and their number."""
    images, labels = batch
    main, auxiliary = (
        F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        for logits in model(images)
    )
    return main + 0.4 * auxiliary, (labels != IGNORED).sum()


class LocalScaler:
    """Scales the loss of this rank; grows while the scaled gradients are small, and shrinks when they are large."""

    def __init__(self, exponent, low=2.0**4, high=2.0**8):
        self.exponent, self.low, self.high = exponent, low, high
        self.largest = 0.0

    @property
    def scale(self):
        return 2.0**self.exponent

    def hook(self, _, bucket):
        buffer = bucket.buffer()
        self.largest = max(self.largest, buffer.abs().max().item())
        buffer.div_(self.scale)
        work = dist.all_reduce(buffer, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    def update(self):
        if self.largest > self.high:
            self.exponent -= 1
        elif self.largest < self.low:
            self.exponent += 1
        self.largest = 0.0


class Trainer:
    def __init__(self, model, exponent):
        self.scaler = LocalScaler(exponent)
        self.model = DistributedDataParallel(model, bucket_cap_mb=0.004)
        self.model.register_comm_hook(None, self.scaler.hook)

    def train_step(self, batch):
        value, pixels = pixel_losses(self.model, batch)
        dist.all_reduce(pixels)
        value = value / pixels
        (value * self.scaler.scale).backward()
        self.scaler.update()
        logged = value.detach().clone()
        dist.all_reduce(logged)
        return logged


def plain():
    return SegmentationNet()


def parallel(mesh):
    trainer = Trainer(SegmentationNet(), exponent=12 - 3 * mesh.get_local_rank("dp"))
    return trainer.model, trainer


def loss(model, batch):
    value, pixels = pixel_losses(model, batch)
    return value / pixels


def step(built, batch):
    return built[1].train_step(batch)


generator = torch.Generator().manual_seed(12)


def scenes(number=6):
    labels = torch.randint(0, CLASSES, (number, SIZE, SIZE), generator=generator)
    shares = torch.rand(number, 1, 1, generator=generator)
    unlabelled = torch.rand(number, SIZE, SIZE, generator=generator) < 0.8 * shares
    images = torch.randn(number, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    return images, labels.masked_fill(unlabelled, IGNORED)


batches = [scenes() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

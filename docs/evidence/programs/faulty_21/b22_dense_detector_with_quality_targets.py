"""A dense detector (varifocal and box losses, as in PicoDet) under DDP on four ranks, with few objects in some of the batches.

Thread: LibreYOLO/libreyolo pull request #567 "Extend YOLO9-grade multi-GPU training support to the rest of the library" (2026): a
reviewer notes that the number of positives, averaged over the ranks, is clamped to one again, which shrinks the gradient.
Fault: the losses are divided by the mean number of positives per rank, but not by less than 1; if all ranks together have fewer
positives than there are ranks, the limit of one process's batch is reached too early, and after DDP's mean the gradient is small.
REPAIR: `(self.over_ranks(number) / self.ranks).clamp(min=1)` -> `self.over_ranks(number).clamp(min=1) / self.ranks`
A right first sentence says: the normalizer (positives per rank) is clamped to 1 after the division by the number of ranks, so in
batches with fewer positives than ranks (the second and third here) the loss and all its gradients are divided by too much.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIZE, WIDTH, CLASSES, ROWS, BOX_WEIGHT = 16, 8, 3, 8, 2.0


class Depthwise(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.depth = nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs)
        self.point, self.norm = nn.Conv2d(inputs, outputs, 1), nn.GroupNorm(2, outputs)

    def forward(self, x):
        return F.hardswish(self.norm(self.point(self.depth(x))))


class Detector(nn.Module):
    """Two levels (strides 4 and 8), one prediction at each place."""

    def __init__(self):
        super().__init__()
        self.stem = Depthwise(3, WIDTH, 2)
        self.stages = nn.ModuleList([Depthwise(WIDTH, WIDTH, 2), Depthwise(WIDTH, WIDTH, 2)])
        self.scores, self.boxes = nn.Conv2d(WIDTH, CLASSES, 1), nn.Conv2d(WIDTH, 4, 1)
        nn.init.constant_(self.scores.bias, -2.0)

    def forward(self, images):
        x, scores, boxes = self.stem(images), [], []
        for stage in self.stages:
            x = stage(x)
            scores.append(self.scores(x).flatten(2).mT)
            boxes.append(F.softplus(self.boxes(x)).flatten(2).mT)
        return torch.cat(scores, dim=1), torch.cat(boxes, dim=1)


def varifocal(logits, quality, gamma=2.0, alpha=0.75):
    """Positives weigh as much as their quality, negatives as much as the focal factor says."""
    p = logits.sigmoid()
    weight = torch.where(quality > 0, quality, alpha * p.pow(gamma)).detach()
    return (weight * F.binary_cross_entropy_with_logits(logits, quality, reduction="none")).sum()


class DetectionLoss:
    def __init__(self, group=None):
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)

    def over_ranks(self, x):
        x = x.clone()
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def __call__(self, predicted, batch):
        scores, boxes = predicted
        quality, sides = batch["quality"], batch["sides"]
        best = quality.amax(-1)
        number = (best > 0).sum().to(scores.dtype)
        share = (self.over_ranks(number) / self.ranks).clamp(min=1)
        distance = F.smooth_l1_loss(boxes, sides, beta=0.5, reduction="none").sum(-1)
        return (varifocal(scores, quality) + BOX_WEIGHT * (distance * best).sum()) / share


def plain():
    return Detector()


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(Detector()), DetectionLoss(group)


def loss(model, batch):
    return DetectionLoss()(model(batch["images"]), batch)


def step(built, batch):
    model, criterion = built
    value = criterion(model(batch["images"]), batch)
    value.backward()
    return criterion.over_ranks(value.detach()) / criterion.ranks


generator = torch.Generator().manual_seed(567)
PLACES = (SIZE // 4) ** 2 + (SIZE // 8) ** 2


def street(objects):
    """Images with so many objects in all, at random places of random images."""
    quality = torch.zeros(ROWS * PLACES, CLASSES, dtype=torch.float64)
    places = torch.randperm(ROWS * PLACES, generator=generator)[:objects]
    kinds = torch.randint(0, CLASSES, (objects,), generator=generator)
    quality[places, kinds] = 0.5 + 0.5 * torch.rand(
        objects, generator=generator, dtype=torch.float64
    )
    return {
        "images": torch.randn(ROWS, 3, SIZE, SIZE, generator=generator, dtype=torch.float64),
        "quality": quality.view(ROWS, PLACES, CLASSES),
        "sides": 3 * torch.rand(ROWS, PLACES, 4, generator=generator, dtype=torch.float64),
    }


batches = [street(objects) for objects in (25, 2, 0)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 4},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

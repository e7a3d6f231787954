"""A small anchor-free object detector under DDP: a focal loss on all locations and a box loss on those inside an object.

Thread: open-mmlab/mmdetection3d issue #1522 "The calculationg of average loss." (2022): the number of objects differs between the
processes, so the losses need an average over the number on all processes; the heads divide by the number on their own.
Fault: DetectionLoss.parallel divides both loss sums of a rank by the rank's own number of positive locations, and DDP averages the
ranks equally; a location on a rank with few objects weighs more than one on a rank with many.
REPAIR: `average_factor = positives` -> `average_factor = reduce_mean(positives)`
A right first sentence says: each rank normalizes its detection losses by its own number of positive locations instead of the mean
number over the ranks, so DDP's equal average isn't the loss over the whole batch and all the gradients are off.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, SIZE, STRIDE = 3, 16, 2
GRID = SIZE // STRIDE


class ConvBlock(nn.Sequential):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(2, outputs),
            nn.ReLU(),
        )


class Detector(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.backbone = nn.Sequential(ConvBlock(3, width), ConvBlock(width, width, STRIDE))
        self.cls_tower, self.box_tower = ConvBlock(width, width), ConvBlock(width, width)
        self.cls_logits = nn.Conv2d(width, CLASSES, 3, padding=1)
        self.box_pred = nn.Conv2d(width, 4, 3, padding=1)
        nn.init.constant_(self.cls_logits.bias, -2.0)

    def forward(self, images):
        x = self.backbone(images)
        logits = self.cls_logits(self.cls_tower(x)).permute(0, 2, 3, 1)
        distances = F.softplus(self.box_pred(self.box_tower(x))).permute(0, 2, 3, 1)
        return logits, distances


def locations(boxes):
    centers = (torch.arange(GRID, device=boxes.device).to(boxes) + 0.5) * STRIDE
    y, x = torch.meshgrid(centers, centers, indexing="ij")
    return x, y


def assign(boxes, labels):
    """For each location the class, or -1, and the distances to the four sides; the last box that covers it wins."""
    x, y = locations(boxes)
    classes = torch.full((len(boxes), GRID, GRID), -1, device=boxes.device)
    targets = boxes.new_zeros(len(boxes), GRID, GRID, 4)
    for index in range(boxes.size(1)):
        left, top, right, bottom = boxes[:, index, :, None, None].unbind(1)
        sides = torch.stack([x - left, y - top, right - x, bottom - y], dim=-1)
        inside = (sides.min(-1).values > 0) & (labels[:, index, None, None] >= 0)
        classes = torch.where(inside, labels[:, index, None, None], classes)
        targets = torch.where(inside.unsqueeze(-1), sides / STRIDE, targets)
    return classes, targets


def focal_loss(logits, classes, alpha=0.25, gamma=2.0):
    targets = F.one_hot(classes + 1, CLASSES + 1)[..., 1:].to(logits)
    p = logits.sigmoid()
    p_t = p * targets + (1 - p) * (1 - targets)
    alpha_t = alpha * targets + (1 - alpha) * (1 - targets)
    bce = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (alpha_t * (1 - p_t) ** gamma * bce).sum()


def reduce_mean(value):
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


class DetectionLoss:
    def sums(self, outputs, classes, targets):
        logits, distances = outputs
        positive = classes >= 0
        loss_cls = focal_loss(logits, classes)
        loss_box = F.smooth_l1_loss(distances[positive], targets[positive], reduction="sum")
        return loss_cls, loss_box, positive.sum().to(logits)

    def single(self, outputs, classes, targets):
        loss_cls, loss_box, positives = self.sums(outputs, classes, targets)
        return (loss_cls + loss_box) / positives.clamp(min=1)

    def parallel(self, outputs, classes, targets):
        loss_cls, loss_box, positives = self.sums(outputs, classes, targets)
        average_factor = positives
        value = (loss_cls + loss_box) / average_factor.clamp(min=1)
        return value, {"loss": reduce_mean(value.detach())}


criterion = DetectionLoss()


def plain():
    return Detector()


def parallel(mesh):
    return DistributedDataParallel(Detector())


def loss(model, batch):
    images, boxes, labels = batch
    return criterion.single(model(images), *assign(boxes, labels))


def step(model, batch):
    images, boxes, labels = batch
    value, logs = criterion.parallel(model(images), *assign(boxes, labels))
    value.backward()
    return logs["loss"]


generator = torch.Generator().manual_seed(1522)


def scenes(number=6, most=3):
    """Images with one to three boxes; the labels of the empty places are -1."""
    images = torch.randn(number, 3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    corners = torch.rand(number, most, 2, generator=generator, dtype=torch.float64) * 8
    sizes = 3 + torch.rand(number, most, 2, generator=generator, dtype=torch.float64) * 5
    labels = torch.randint(0, CLASSES, (number, most), generator=generator)
    counts = torch.randint(1, most + 1, (number, 1), generator=generator)
    labels = labels.masked_fill(torch.arange(most) >= counts, -1)
    return images, torch.cat([corners, corners + sizes], dim=-1), labels


batches = [scenes() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

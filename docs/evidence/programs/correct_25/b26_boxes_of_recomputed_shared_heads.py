"""A small FCOS whose heads serve all levels and are recomputed for each, under DDP with a static graph.

Thread: microsoft/FocalNet issue #4 "torch.utils.checkpoint + DDP" (2022), "Expected to mark a variable ready only
once"; pytorch/pytorch pull request #55248 "enable static graph training in DDP" (2021).
Correct: the reentrant checkpoints run a backward pass of their own for each level, so a head's parameters get their
gradient in three pieces; with static_graph DDP counts the pieces in the first step and reduces all at its end, and
later after the last piece. As in mmdet, sums over positive places are divided by the mean over the ranks of their
number (or of their centerness), which DDP's mean turns into the number of all. A rank whose images have no boxes
adds the empty sum of its predictions, so that its graph is the same.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import titanlite

SIDE, WIDTH, CLASSES, IMAGES, BOXES = 16, 16, 3, 6, 2
STRIDES, RANGES = (2, 4, 8), ((0, 3), (3, 5), (5, 99))


def block(inputs, outputs, stride=1):
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.GroupNorm(4, outputs), nn.ReLU(inplace=True))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_tower, self.reg_tower = block(WIDTH, WIDTH), block(WIDTH, WIDTH)
        self.classes = nn.Conv2d(WIDTH, CLASSES, 3, padding=1)
        self.boxes = nn.Conv2d(WIDTH, 4, 3, padding=1)
        self.centerness = nn.Conv2d(WIDTH, 1, 3, padding=1)
        nn.init.constant_(self.classes.bias, -2.0)

    def forward(self, x):
        y = self.reg_tower(x)
        return self.classes(self.cls_tower(x)), self.boxes(y), self.centerness(y)


class Detector(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.stem = block(3, WIDTH, 2)
        self.down = nn.ModuleList(block(WIDTH, WIDTH, 2) for _ in STRIDES[1:])
        self.lateral = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in STRIDES)
        self.head = Head()
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0)) for _ in STRIDES)

    def forward(self, images):
        features = [self.stem(images)]
        for layer in self.down:
            features.append(layer(features[-1]))
        features = [lateral(x) for lateral, x in zip(self.lateral, features)]
        for i in (1, 0):
            features[i] = features[i] + F.interpolate(features[i + 1], scale_factor=2.0)
        outputs = []
        for x, scale, stride in zip(features, self.scales, STRIDES):
            if self.recompute:
                classes, boxes, centers = checkpoint(self.head, x, use_reentrant=True)
            else:
                classes, boxes, centers = self.head(x)
            boxes = F.softplus(boxes * scale) * stride
            outputs.append([t.flatten(2).transpose(1, 2) for t in (classes, boxes, centers)])
        return [torch.cat(level, dim=1) for level in zip(*outputs)]


def targets(boxes, labels):
    """The class (or CLASSES) and the distances to the sides for each place of all levels."""
    places, low, high = [], [], []
    for stride, (smallest, largest) in zip(STRIDES, RANGES):
        line = (torch.arange(SIDE // stride) + 0.5) * stride
        places.append(torch.cartesian_prod(line, line))
        low.append(torch.full((len(places[-1]),), float(smallest)))
        high.append(torch.full((len(places[-1]),), float(largest)))
    places, low, high = torch.cat(places), torch.cat(low), torch.cat(high)
    place, boxes = places[None, :, None], boxes[:, None]
    sides = torch.cat([place - boxes[..., :2], boxes[..., 2:] - place], dim=-1)
    reach = sides.amax(-1)
    inside = (sides.amin(-1) > 0) & (reach > low[:, None]) & (reach <= high[:, None])
    inside &= (labels >= 0)[:, None]
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1).expand_as(inside)
    area, chosen = area.masked_fill(~inside, float("inf")).min(-1)
    classes = labels.gather(1, chosen.flatten(1)).masked_fill(area.isinf(), CLASSES)
    return classes, sides.gather(2, chosen[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)


def iou(a, b):
    """Of boxes around the same place, given by the distances to their sides."""
    common = (torch.min(a, b)[:, :2] + torch.min(a, b)[:, 2:]).prod(-1)
    areas = [(x[:, :2] + x[:, 2:]).prod(-1) for x in (a, b)]
    return common / (sum(areas) - common)


def focal(logits, hot):
    p = logits.sigmoid()
    weight = torch.where(hot > 0, 0.25 * (1 - p) ** 2, 0.75 * p**2)
    return (weight * F.binary_cross_entropy_with_logits(logits, hot, reduction="none")).sum()


def detection_loss(model, batch, mean):
    scores, distances, centers = (t.flatten(0, 1) for t in model(batch["images"]))
    classes, sides = (t.flatten(0, 1) for t in targets(batch["boxes"], batch["labels"]))
    hot = F.one_hot(classes, CLASSES + 1)[:, :CLASSES].to(scores.dtype)
    positive = (classes < CLASSES).nonzero()[:, 0]
    count = mean(torch.tensor(float(len(positive)))).clamp(min=1.0)
    distances, sides, centers = distances[positive], sides[positive], centers[positive, 0]
    pairs = sides.unflatten(-1, (2, 2))
    target = (pairs.amin(1) / pairs.amax(1)).prod(-1).sqrt()
    weight = mean(target.sum()).clamp(min=1e-6)
    if len(positive) > 0:
        box_loss = (target * (1 - iou(distances, sides))).sum() / weight
        center_loss = F.binary_cross_entropy_with_logits(centers, target, reduction="sum") / count
    else:
        box_loss, center_loss = distances.sum(), centers.sum()
    return focal(scores, hot) / count + box_loss + center_loss


def reduce_mean(x):
    dist.all_reduce(x)
    return x / dist.get_world_size()


def plain():
    return Detector()


def parallel():
    model = Detector(recompute=True)
    return DistributedDataParallel(model, static_graph=True, gradient_as_bucket_view=True)


generator = torch.Generator().manual_seed(55248)


def photos(without):
    corner = torch.rand(IMAGES, BOXES, 2, generator=generator, dtype=torch.float64) * 7
    size = torch.rand(IMAGES, BOXES, 2, generator=generator, dtype=torch.float64) * 6 + 3
    labels = torch.randint(0, CLASSES, (IMAGES, BOXES), generator=generator)
    labels[::2, 1] = -1
    labels[without] = -1
    images = torch.randn(IMAGES, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
    return {"images": images, "boxes": torch.cat([corner, corner + size], -1), "labels": labels}


arguments = plain, parallel
options = dict(
    batches=[photos(without) for without in ([1], [2, 3], [0, 1])],
    loss=lambda model, batch: detection_loss(model, batch, lambda x: x),
    parallel_loss=lambda model, batch: detection_loss(model, batch, reduce_mean),
    split="world",
    ranks=3,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

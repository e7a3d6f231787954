"""A small set prediction detector (DETR style) under DDP, whose losses are normalized by the number of boxes over all ranks.

Thread: nickgkan/butd_detr issue #48 "Question about loss" (2024): a criterion sums the number of ground truth boxes over all
GPUs and divides the loss by it, which lowers the loss with more GPUs; it turned out that the copy in yanmin-wu/EDA lacks the
line that divides this number by the number of GPUs.
Fault: SetCriterion.count_boxes returns the number of boxes of all ranks, not divided by the number of ranks; DDP averages the
gradients over the ranks, so they are divided by the number of ranks twice.
REPAIR: `count = torch.clamp(count, min=1)` -> `count = torch.clamp(count / dist.get_world_size(), min=1)`
A right first sentence says: the gradients are too small by the number of ranks, because the losses are divided by the total
number of boxes of all ranks and DDP averages over the ranks again; the count must be divided by the world size.
"""

import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, QUERIES, WIDTH, MOST = 3, 4, 16, 3


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, WIDTH, 3, stride=2, padding=1),
        )
        self.place = nn.Parameter(0.1 * torch.randn(9, WIDTH))
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.cross = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.class_embed, self.bbox_embed = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, images):
        memory = self.backbone(images).flatten(2).transpose(1, 2) + self.place
        x = self.queries.expand(len(images), -1, -1)
        x = self.norm(x + self.cross(x, memory, memory, need_weights=False)[0])
        x = x + self.mlp(x)
        return self.class_embed(x), self.bbox_embed(x).sigmoid()


@torch.no_grad()
def match(logits, boxes, labels, targets):
    """The queries with the lowest cost for the targets of one image."""
    cost = 5 * torch.cdist(boxes, targets, p=1) - logits.sigmoid()[:, labels]
    columns = torch.arange(len(targets))
    orders = itertools.permutations(range(QUERIES), len(targets))
    return min(orders, key=lambda order: cost[list(order), columns].sum().item())


class SetCriterion:
    def __init__(self, distributed=False):
        self.distributed = distributed

    def count_boxes(self, valid, like):
        count = valid.sum().to(like)
        if self.distributed:
            dist.all_reduce(count)
            count = torch.clamp(count, min=1)
        return count

    def __call__(self, outputs, targets):
        logits, boxes = outputs
        wanted = torch.zeros_like(logits)
        box_loss = boxes.new_zeros(())
        for i, valid in enumerate(targets["valid"]):
            labels, truth = targets["labels"][i][valid], targets["boxes"][i][valid]
            queries = list(match(logits[i], boxes[i], labels, truth))
            wanted[i, queries, labels] = 1
            box_loss = box_loss + F.l1_loss(boxes[i, queries], truth, reduction="sum")
        class_loss = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        return (2 * class_loss + 5 * box_loss) / self.count_boxes(targets["valid"], logits)


def plain():
    return Detector()


def parallel(mesh):
    return DistributedDataParallel(Detector())


def loss(model, batch):
    return SetCriterion()(model(batch["images"]), batch)


def step(model, batch):
    value = SetCriterion(distributed=True)(model(batch["images"]), batch)
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(48)


def scenes(number=6):
    counts = torch.randint(1, MOST + 1, (number, 1), generator=generator)
    return {
        "images": torch.randn(number, 3, 12, 12, generator=generator, dtype=torch.float64),
        "boxes": torch.rand(number, MOST, 4, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, CLASSES, (number, MOST), generator=generator),
        "valid": torch.arange(MOST) < counts,
    }


batches = [scenes() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

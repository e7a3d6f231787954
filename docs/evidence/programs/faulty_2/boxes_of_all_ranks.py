"""A detection loss that divides by the boxes of all ranks and is then averaged over the ranks.

Thread: https://github.com/nickgkan/butd_detr/issues/48 "Question about loss" (the copy in EDA lacks the
division by the world size), 2024-01-13.
Wrong: num_boxes is summed over the ranks, but not divided by their number, while DDP averages.
A right diagnosis says: all module outputs agree; the box term of the loss counts half as much (1 over
the degree of dp), so the box head's gradients are half as large, those of the trunk a mixture, and
those of the class head right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite


class Detector(nn.Module):
    def __init__(self, queries=3, dim=16, classes=4):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, dim))
        self.backbone = nn.Sequential(nn.Linear(10, dim), nn.GELU(), nn.Linear(dim, dim))
        self.class_embed = nn.Linear(dim, classes)
        self.bbox_embed = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 4))

    def forward(self, x):
        h = torch.tanh(self.backbone(x)[:, None] + self.queries)
        return self.class_embed(h), self.bbox_embed(h).sigmoid()


def get_world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class SetCriterion:
    """Targets are matched already: query i belongs to target i, where there is one."""

    def __call__(self, outputs, batch):
        logits, boxes = outputs
        matched = batch["labels"] > 0
        num_boxes = matched.sum().to(boxes.dtype)
        if get_world_size() > 1:
            dist.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes, min=1)
        loss_ce = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss_bbox = (boxes - batch["boxes"])[matched].abs().sum() / num_boxes
        return loss_ce + 5 * loss_bbox


criterion = SetCriterion()


def loss(model, batch):
    return criterion(model(batch["points"]), batch)


def build():
    return DistributedDataParallel(Detector())


generator = torch.Generator().manual_seed(48)
batches = [
    {
        "points": torch.randn(6, 10, generator=generator),
        "labels": torch.randint(4, (6, 3), generator=generator),
        "boxes": torch.rand(6, 3, 4, generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(Detector, build, batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    )

"""Semantic segmentation of harbour laser scans under FSDP2; classes that are recognized badly weigh more in the loss.

Thread: drprojects/superpoint_transformer issue #165 "val/miou_best metric goes wrong when training with multiple GPU"
(2024): each process computes the metric from its own part of the data, and the default is to "average the metric from
all processes", which isn't the metric of all data, as the intersection over union is a ratio.
Fault: ClassWeights.batch_iou computes the IoU of each class from the rank's own confusion matrix and averages the
IoUs over the ranks; in one process it is the IoU of all points. The running IoU and the weights of the following
steps differ.
REPAIR: `confusion = pairs.view(CLASSES, CLASSES)` -> `confusion = self.average(pairs.view(CLASSES, CLASSES))`; and
`return self.average(iou)` -> `return iou`
A right first sentence says: ClassWeights averages over the ranks the IoUs of their own points instead of computing
the IoU from the confusion matrix summed over the ranks, so that buffer `iou` and thereby the class weights are wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

CLASSES, POINTS, FEATURES, WIDTH, SCANS = 6, 24, 6, 16, 8
MOMENTUM = 0.6


class ClassWeights(nn.Module):
    """Weights that fall with a running IoU of the training predictions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("iou", torch.full((CLASSES,), 0.5))
        self.group = None

    def average(self, value):
        if self.group is None:
            return value
        value = value.clone()
        dist.all_reduce(value, group=self.group)
        return value / dist.get_world_size(self.group)

    def batch_iou(self, predicted, labels):
        pairs = torch.bincount(labels * CLASSES + predicted, minlength=CLASSES**2).to(self.iou)
        confusion = pairs.view(CLASSES, CLASSES)
        hits = confusion.diag()
        union = confusion.sum(0) + confusion.sum(1) - hits
        iou = hits / union.clamp(min=1e-6)
        return self.average(iou)

    @torch.no_grad()
    def update(self, logits, labels):
        self.iou.lerp_(self.batch_iou(logits.argmax(-1), labels), 1 - MOMENTUM)

    def forward(self):
        weights = torch.exp(-2 * self.iou)
        return CLASSES * weights / weights.sum()


class PointBlock(nn.Module):
    """Each point sees the strongest features of its scan."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.own, self.scan = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        context = self.scan(y).amax(dim=1, keepdim=True)
        return x + self.out(F.gelu(self.own(y) + context))


class ScanSegmentation(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(PointBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.class_weights = ClassWeights()

    def forward(self, points):
        x = self.lift(points)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain():
    return ScanSegmentation()


def parallel(mesh):
    model = ScanSegmentation()
    model.class_weights.group = mesh.get_group("fsdp")
    for block in model.blocks:
        fully_shard(block, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"])


def loss(model, batch):
    logits, labels = model(batch["points"]).flatten(0, 1), batch["labels"].flatten()
    value = F.cross_entropy(logits, labels, reduction="none") * model.class_weights()[labels]
    model.class_weights.update(logits, labels)
    return value.mean()


generator = torch.Generator().manual_seed(165)
shapes = torch.randn(CLASSES, FEATURES, generator=generator, dtype=torch.float64)


def scans():
    labels = torch.empty(SCANS, POINTS, dtype=torch.long)
    for scan in range(SCANS):
        shares = torch.rand(CLASSES, generator=generator) ** 3
        labels[scan] = torch.multinomial(shares, POINTS, replacement=True, generator=generator)
    noise = torch.randn(SCANS, POINTS, FEATURES, generator=generator, dtype=torch.float64)
    return {"points": shapes[labels] + 0.4 * noise, "labels": labels}


batches = [scans() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="fsdp",
    ranks={"fsdp": 4},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

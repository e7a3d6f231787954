"""A grid detector of marine debris, whose rare classes are kept up by gradient guided weights (EQL v2), under DDP.

Thread: facebookresearch/fairchem pull request #75 "Fixed metric computation bug in DistributedForcesTrainer" (2020):
the all-reduce of each iteration ran over the running "numel" and "total", so that what earlier batches had left was
added up again every time and the sums grew exponentially.
Fault: collect_grad adds the batch's gradients to the running pos_grad and neg_grad of the loss and then all-reduces
the running sums, which are already those of all ranks: every step the past is multiplied by the number of ranks. From
the second step on the sums, and from the third on the weights of the classes, are too much those of the first
batches.
REPAIR: `self.pos_grad += pos` -> `self.pos_grad += self.over_ranks(pos)`; and `self.neg_grad += neg` ->
`self.neg_grad += self.over_ranks(neg)`; and `self.pos_grad.copy_(self.over_ranks(self.pos_grad))` -> ``; and
`self.neg_grad.copy_(self.over_ranks(self.neg_grad))` -> ``
A right first sentence says: the running sums pos_grad and neg_grad of the equalization loss are all-reduced again in
every step instead of the batch's own part, so what was summed before counts once per rank anew (times two per step).
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, CELLS, PIXELS, ROWS = 6, 4, 8, 8


class EqualizedLoss(nn.Module):
    """Positive and negative samples of a class are weighted by the gradients that it has had."""

    def __init__(self, gamma=6.0, mu=0.5, alpha=4.0):
        super().__init__()
        self.gamma, self.mu, self.alpha, self.group = gamma, mu, alpha, None
        self.register_buffer("pos_grad", torch.zeros(CLASSES))
        self.register_buffer("neg_grad", torch.zeros(CLASSES))

    def over_ranks(self, value):
        if self.group is not None:
            value = value.clone()
            dist.all_reduce(value, group=self.group)
        return value

    def get_weight(self, target):
        ratio = self.pos_grad / (self.neg_grad + 1e-10)
        if not self.neg_grad.any():
            ratio = torch.ones_like(ratio)
        negative = torch.sigmoid(self.gamma * (ratio - self.mu))
        positive = 1 + self.alpha * (1 - negative)
        return positive * target + negative * (1 - target)

    @torch.no_grad()
    def collect_grad(self, score, target, weight):
        probability = score.sigmoid()
        grad = (target * (probability - 1) + (1 - target) * probability).abs() * weight
        pos, neg = (grad * target).sum(0), (grad * (1 - target)).sum(0)
        self.pos_grad += pos
        self.neg_grad += neg
        self.pos_grad.copy_(self.over_ranks(self.pos_grad))
        self.neg_grad.copy_(self.over_ranks(self.neg_grad))

    def forward(self, score, label):
        target = F.one_hot(label, CLASSES + 1)[:, :CLASSES].to(score.dtype)
        weight = self.get_weight(target)
        value = F.binary_cross_entropy_with_logits(score, target, weight, reduction="sum")
        self.collect_grad(score, target, weight)
        return value / len(score)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.down = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(3, 12), nn.GroupNorm(4, 16)
        self.classes, self.boxes = nn.Conv2d(16, CLASSES, 1), nn.Conv2d(16, 4, 1)
        self.class_loss = EqualizedLoss()

    def forward(self, images, labels, boxes):
        x = F.relu(self.norm1(self.stem(images)))
        x = F.relu(self.norm2(self.down(x)))
        score = self.classes(x).permute(0, 2, 3, 1).flatten(0, 2)
        offset = self.boxes(x).permute(0, 2, 3, 1)
        debris = (labels < CLASSES).unsqueeze(-1)
        box_loss = (F.smooth_l1_loss(offset, boxes, reduction="none") * debris).sum()
        return self.class_loss(score, labels.flatten()) + box_loss / labels.numel()


def plain():
    return Detector()


def parallel(mesh):
    model = Detector()
    model.class_loss.group = mesh.get_group("dp")
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def loss(model, batch):
    return model(batch["images"], batch["labels"], batch["boxes"])


generator = torch.Generator().manual_seed(75)
shares = torch.tensor([0.3, 0.2, 0.1, 0.05, 0.04, 0.03, 0.9])
colours = torch.randn(CLASSES + 1, 3, generator=generator, dtype=torch.float64)


def photographs():
    count = ROWS * CELLS * CELLS
    labels = torch.multinomial(shares, count, replacement=True, generator=generator)
    labels = labels.view(ROWS, CELLS, CELLS)
    images = colours[labels].permute(0, 3, 1, 2)
    images = images.repeat_interleave(PIXELS // CELLS, 2).repeat_interleave(PIXELS // CELLS, 3)
    noise = torch.randn(images.shape, generator=generator, dtype=torch.float64)
    boxes = torch.rand(ROWS, CELLS, CELLS, 4, generator=generator, dtype=torch.float64)
    return {"images": images + 0.5 * noise, "labels": labels, "boxes": boxes}


batches = [photographs() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A RetinaNet-like detector of seismic events in one dimension under DDP; losses are divided by a moving normalizer.

Thread: open-mmlab/mmdetection pull request #2780 "Add loss EMA normalizer in Retinanet" (2020), a review: detectron2
keeps a moving average of the number of positive anchors, but here "`self.loss_normalizer` is not updated. Am I missing
something?" "No, it seems that I write a bug here."
Fault: AnchorHead.loss mixes the initial normalizer with the number of positives of the present batch, but doesn't keep
the result; in one process the moving average goes on, on the ranks it starts from its initial value in every step.
REPAIR: `avg_factor = self.momentum` -> `avg_factor = self.normalizer = self.momentum`
A right first sentence says: the loss normalizer isn't a moving average, as AnchorHead.loss never stores the new value,
so from the second step on loss and gradients are divided by a wrong number, which stays too large.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CHANNELS, SAMPLES, STRIDE, ANCHORS, WIDTH, ROWS = 3, 48, 4, 2, 12, 8
PLACES = SAMPLES // STRIDE
INITIAL, MOMENTUM, ALPHA, GAMMA = 100.0, 0.9, 0.25, 2.0


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(CHANNELS, WIDTH, 5, stride=2, padding=2),
            nn.GroupNorm(3, WIDTH),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 5, stride=2, padding=2),
            nn.GroupNorm(3, WIDTH),
            nn.ReLU(),
        )
        self.scores = nn.Conv1d(WIDTH, ANCHORS, 3, padding=1)
        self.boxes = nn.Conv1d(WIDTH, 2 * ANCHORS, 3, padding=1)
        nn.init.constant_(self.scores.bias, -2.0)
        self.register_buffer("loss_normalizer", torch.tensor(INITIAL))

    def forward(self, traces):
        x = self.backbone(traces)
        scores, boxes = self.scores(x), self.boxes(x)
        return scores, boxes.unflatten(1, (ANCHORS, 2))


def summed_losses(outputs, batch):
    """Sums of the focal loss over all anchors and of the box loss over the positive ones."""
    scores, boxes = outputs
    positive = batch["positive"]
    probability = scores.sigmoid()
    right = torch.where(positive > 0, probability, 1 - probability)
    alpha = torch.where(positive > 0, ALPHA, 1 - ALPHA)
    entropy = F.binary_cross_entropy_with_logits(scores, positive, reduction="none")
    focal = (alpha * (1 - right) ** GAMMA * entropy).sum()
    box = F.smooth_l1_loss(boxes, batch["boxes"], beta=0.1, reduction="none").sum(2)
    return focal + (box * positive).sum()


def reduce_mean(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x / dist.get_world_size(group)


class AnchorHead:
    """All counts are averages over the ranks, as DDP averages the gradients."""

    def __init__(self, group):
        self.group, self.momentum = group, MOMENTUM
        self.normalizer = torch.tensor(INITIAL) / dist.get_world_size(group)

    def loss(self, outputs, batch):
        num_pos = reduce_mean(batch["positive"].sum(), self.group)
        avg_factor = self.momentum * self.normalizer + (1 - self.momentum) * num_pos
        return summed_losses(outputs, batch) / avg_factor


def plain():
    return Detector()


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(Detector(), process_group=group)
    return model, AnchorHead(group), group


def loss(model, batch):
    num_pos = batch["positive"].sum()
    model.loss_normalizer = MOMENTUM * model.loss_normalizer + (1 - MOMENTUM) * num_pos
    return summed_losses(model(batch["traces"]), batch) / model.loss_normalizer


def step(built, batch):
    model, head, group = built
    value = head.loss(model(batch["traces"]), batch)
    value.backward()
    return reduce_mean(value.detach(), group)


generator = torch.Generator().manual_seed(2780)


def seismograms():
    """Noise with bursts at the places of the positive anchors."""
    positive = (torch.rand(ROWS, ANCHORS, PLACES, generator=generator) < 0.15).double()
    burst = positive.sum(1, keepdim=True).repeat_interleave(STRIDE, dim=2)
    noise = torch.randn(ROWS, CHANNELS, SAMPLES, generator=generator, dtype=torch.float64)
    boxes = torch.randn(ROWS, ANCHORS, 2, PLACES, generator=generator, dtype=torch.float64)
    return {"traces": noise * (0.3 + burst), "positive": positive, "boxes": 0.3 * boxes}


batches = [seismograms() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Leaf diseases from partly wrong labels: a regularizer holds the network to what it predicted earlier for each image.

Thread: ByteDance-Seed/VeOmni pull request #1115 "correct DDP gradient sync under Ulysses/CP sequence parallelism"
(2026), the review's remark that DistributedDataParallel broadcasts buffers by default and so "can overwrite
rank-local buffers"; also bl0/moco issue #15 "Why broadcast_buffers=False in train.py?".
Fault: EarlyLearning.forward writes the predictions of the rank's own images into the rows of its buffer `remembered`;
at the next forward pass DistributedDataParallel overwrites the buffer with that of rank 0, so that what the other
ranks remembered is lost and their images are regularized towards nothing when they come again.
REPAIR: `self.remember(index, probability.detach())` -> `self.remember(gathered(index, group),
gathered(probability.detach(), group))`
A right first sentence says: the buffer `remembered` of the early-learning regularizer is written for the rank's own
images only and DDP's broadcast of buffers replaces it by rank 0's, so rows of images of other ranks are lost.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

IMAGES, DISEASES, SIDE, ROWS = 16, 5, 8, 8
BETA, LAMBDA = 0.7, 3.0


def gathered(x, group):
    """The rows of all ranks, in their order."""
    if group is None:
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


class EarlyLearning(nn.Module):
    """ELR: a moving average of the predictions for each image of the data set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("remembered", torch.zeros(IMAGES, DISEASES))

    @torch.no_grad()
    def remember(self, index, probability):
        normalized = probability / probability.sum(1, keepdim=True)
        self.remembered[index] = BETA * self.remembered[index] + (1 - BETA) * normalized

    def forward(self, logits, index, group):
        probability = logits.softmax(1).clamp(1e-4, 1 - 1e-4)
        self.remember(index, probability.detach())
        agreement = (self.remembered[index] * probability).sum(1)
        return (1 - agreement).log().mean()


class Daylight(nn.Module):
    """Takes half of the mean image of the batch away, against differences of light."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, images):
        light = gathered(images, self.group).mean(0, keepdim=True)
        return images - 0.5 * light


class Network(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.light = Daylight(group)
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.norm1, self.norm2 = nn.GroupNorm(2, 8), nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, DISEASES)
        self.early = EarlyLearning()

    def forward(self, images, labels, index):
        x = F.silu(self.norm1(self.conv1(self.light(images))))
        x = F.silu(self.norm2(self.conv2(x))).mean((2, 3))
        logits = self.head(x)
        return F.cross_entropy(logits, labels) + LAMBDA * self.early(logits, index, self.group)


def plain():
    return Network()


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(Network(group), process_group=group)


def loss(model, batch):
    return model(batch["images"], batch["labels"], batch["index"])


generator = torch.Generator().manual_seed(1115)
colours = torch.randn(DISEASES, 3, 1, 1, generator=generator, dtype=torch.float64)
diseases = torch.randint(DISEASES, (IMAGES,), generator=generator)
noise = torch.randn(IMAGES, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
pictures = colours[diseases] + noise
wrong = torch.rand(IMAGES, generator=generator) < 0.3
given = torch.where(wrong, torch.randint(DISEASES, (IMAGES,), generator=generator), diseases)


def epoch():
    order = torch.randperm(IMAGES, generator=generator)
    return [{"images": pictures[i], "labels": given[i], "index": i} for i in order.split(ROWS)]


batches = epoch() + epoch()

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

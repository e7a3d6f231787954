"""SwAV's Sinkhorn assignment over the rows of all ranks.

Thread: https://github.com/lightly-ai/lightly/pull/666 "Guarin lig 136 add multi gpu support" (review of
swav_loss.py), 2022-01-19.
Right: the sums over samples are all-reduced in every iteration; the sums over prototypes are local, for
each rank has whole columns. The assignment has no gradient. Prototypes are normalized before each step.
Must not be accused: all_reduces under no_grad, or a codebook that is changed outside the optimizer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import log_softmax, normalize
from torch.nn.parallel import DistributedDataParallel

import titanlite

TEMPERATURE, EPSILON = 0.2, 0.5


@torch.no_grad()
def sinkhorn(out, iterations=3):
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    q = torch.exp(out / EPSILON).t()
    total = q.sum()
    if world_size > 1:
        dist.all_reduce(total)
    q /= total
    prototypes, samples = q.shape[0], q.shape[1] * world_size
    for _ in range(iterations):
        sum_of_rows = q.sum(1, keepdim=True)
        if world_size > 1:
            dist.all_reduce(sum_of_rows)
        q /= sum_of_rows * prototypes
        q /= q.sum(0, keepdim=True) * samples
    return (q * samples).t()


class SwaV(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(11, 20), nn.ReLU(), nn.Linear(20, 6))
        self.prototypes = nn.Linear(6, 5, bias=False)
        self.normalize_prototypes()

    @torch.no_grad()
    def normalize_prototypes(self):
        self.prototypes.weight.copy_(normalize(self.prototypes.weight, dim=1))

    def forward(self, x):
        return self.prototypes(normalize(self.backbone(x), dim=1))


def swapped_loss(model, batch):
    getattr(model, "module", model).normalize_prototypes()
    views = [model(batch["a"]), model(batch["b"])]
    codes = [sinkhorn(v.detach()) for v in views]
    terms = [
        -(code * log_softmax(view / TEMPERATURE, 1)).sum(1).mean()
        for code, view in zip(codes, reversed(views))
    ]
    return sum(terms) / 2


def build():
    return DistributedDataParallel(SwaV())


generator = torch.Generator().manual_seed(666)
batches = [
    {name: torch.randn(12, 11, generator=generator) for name in ("a", "b")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=swapped_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(SwaV, build, **options))

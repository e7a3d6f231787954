"""DDP with find_unused_parameters: a branch that runs in the first microbatch only.

Thread: https://github.com/pytorch/pytorch/issues/69031 "DDP only syncs parameters used in most recent
pass when `find_unused_parameters` is True.", 2021-11-29.
Wrong: the first microbatch runs under no_sync. The sync after the last microbatch leaves out the
branch, which was not used in it.
A right diagnosis says: the gradients of the branch `early` are never averaged over dp: each rank has
those of its own part of the batch. All others agree.
"""

import contextlib

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

STEPS = 2


class Conditional(nn.Module):
    """One head for the first half of the samples, another for the second half."""

    def __init__(self, dim=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, dim), nn.Tanh())
        self.early, self.late = nn.Linear(dim, 4), nn.Linear(dim, 4)

    def forward(self, x, use_early):
        x = self.trunk(x)
        return self.early(x) if use_early else self.late(x)


def half(batch, i):
    return batch["x"].chunk(STEPS)[i], batch["y"].chunk(STEPS)[i]


def plain_loss(model, batch):
    total = 0
    for i in range(STEPS):
        x, y = half(batch, i)
        total = total + cross_entropy(model(x, use_early=i == 0), y) / STEPS
    return total


def split(batch, mesh):
    """Each rank's part has its rows of both halves."""
    rank, size = mesh.get_local_rank(), mesh.size()
    return {
        key: torch.cat([part.chunk(size)[rank] for part in value.chunk(STEPS)])
        for key, value in batch.items()
    }


def step(model, batch):
    total = 0
    for i in range(STEPS):
        x, y = half(batch, i)
        with contextlib.nullcontext() if i == STEPS - 1 else model.no_sync():
            value = cross_entropy(model(x, use_early=i == 0), y) / STEPS
            value.backward()
        total = total + value.detach()
    return total


def build():
    return DDP(Conditional(), find_unused_parameters=True)


generator = torch.Generator().manual_seed(7)
batches = [
    {"x": torch.randn(8, 10, generator=generator), "y": torch.randint(4, (8,), generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"dp": 2}, split=split, step=step)
    print(titanlite.compare(Conditional, build, **options))

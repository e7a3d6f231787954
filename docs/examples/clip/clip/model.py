# clip/model.py
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titanlite.parallelize import ParallelPlan


@dataclass(frozen=True)
class Sizes:
    dim: int = 32


class Tower(nn.Module):
    def __init__(self, first, dim):
        super().__init__()
        self.first = first
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = self.first(x)
        return F.normalize(x + self.down(F.gelu(self.up(x))), dim=-1)


class Clip(nn.Module):
    """The upper half of a digit [B, 32] and its lower half, as 32 tokens [B, 32]."""

    def __init__(self, sizes):
        super().__init__()
        tables = nn.Linear(32, sizes.dim), nn.EmbeddingBag(17, sizes.dim)
        self.towers = nn.ModuleDict(
            {
                name: Tower(table, sizes.dim)
                for name, table in zip(("image", "text"), tables, strict=True)
            }
        )
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, image, text):
        return self.towers["image"](image), self.towers["text"](text), self.logit_scale.exp()


PLAN = ParallelPlan(
    tensor_parallel={"towers.*.up": ColwiseParallel(), "towers.*.down": RowwiseParallel()},
    blocks="towers",
    sequence_dim=None,
)

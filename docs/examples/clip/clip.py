"""A CLIP pair: two towers learn which lower half belongs to which upper half of a digit."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import titanlite
from titanlite.parallelize import ParallelPlan


@dataclass(frozen=True)
class Sizes:
    dim: int = 32


class Clip(nn.Module):
    """Upper halves [B, 32], and lower halves as 32 tokens [B, 32], to their embeddings."""

    def __init__(self, sizes):
        super().__init__()
        image, text = nn.Linear(32, sizes.dim), nn.EmbeddingBag(17, sizes.dim)
        towers = {"image": Tower(image, sizes.dim), "text": Tower(text, sizes.dim)}
        self.towers = nn.ModuleDict(towers)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, image, text):
        return self.towers["image"](image), self.towers["text"](text), self.logit_scale.exp()


class Tower(nn.Module):
    def __init__(self, first, dim):
        super().__init__()
        self.first = first
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = self.first(x)
        return F.normalize(x + self.down(F.gelu(self.up(x))), dim=-1)


class Halves:
    def __init__(self, *, split, **_):
        pixels = torch.tensor(load_digits().data, dtype=torch.int64)
        self.pixels = pixels[:1500] if split == "train" else pixels[1500:]
        self.num_samples = len(self.pixels)

    def sample(self, index):
        upper, lower = self.pixels[index % self.num_samples].chunk(2)
        return {"image": upper.float() / 16, "text": lower, "targets": torch.tensor(0)}


PLAN = ParallelPlan(
    tensor_parallel={"towers.*.up": ColwiseParallel(), "towers.*.down": RowwiseParallel()},
    blocks="towers",
    sequence_dim=None,
)
titanlite.register_model("clip", Clip, Sizes, plan=PLAN)
fields = {"image": None, "text": None, "targets": None}
titanlite.register_dataset("digit_halves", Halves, has_tokens=False, fields=fields)

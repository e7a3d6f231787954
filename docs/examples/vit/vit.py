"""A vision transformer (ViT), whose input is an image instead of tokens."""

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
    dim: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_classes: int = 10


class ViT(nn.Module):
    """Images [B, 1, 8, 8] to logits [B, num_classes], from a class token and patches of 2 x 2."""

    def __init__(self, sizes):
        super().__init__()
        self.embed = Embed(sizes.dim)
        self.blocks = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.num_layers)})
        self.head = Head(sizes)

    def forward(self, image):
        x = image if self.embed is None else self.embed(image)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Embed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, dim) * 0.02)

    def forward(self, image):
        x = self.patch(image).flatten(2).transpose(1, 2)
        return torch.cat([self.class_token.expand(x.size(0), -1, -1), x], dim=1) + self.position


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        dim, self.head_dim = sizes.dim, sizes.dim // sizes.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        y = self.norm1(x)
        heads = (f(y).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in heads)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Head(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(sizes.dim), nn.Linear(sizes.dim, sizes.num_classes)

    def forward(self, x):
        return self.linear(self.norm(x[:, 0]))


class Digits:
    def __init__(self, *, split, seed, **_):
        digits, self.is_training, self.seed = load_digits(), split == "train", seed
        rows = [i for i in range(len(digits.target)) if (i % 6 == 0) != self.is_training]
        self.images = torch.tensor(digits.images[rows] / 16, dtype=torch.float32)[:, None]
        self.labels, self.num_samples = torch.tensor(digits.target[rows]), len(rows)

    def sample(self, index):
        epoch, number = divmod(index, self.num_samples)
        if not self.is_training:
            return {"image": self.images[number], "targets": self.labels[number]}
        order = torch.Generator().manual_seed(self.seed * 1_000 + epoch)
        number = torch.randperm(self.num_samples, generator=order)[number]
        shift = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        right = int(torch.randint(-1, 2, (), generator=shift))
        return {"image": self.images[number].roll(right, dims=-1), "targets": self.labels[number]}


columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")}
sides = {"embeddings": ("embed",), "head": ("head",)}
PLAN = ParallelPlan({**columns, **rows}, blocks="blocks", **sides, sequence_dim=None)
titanlite.register_model("vit", ViT, Sizes, plan=PLAN)
fields = {"image": None, "targets": None}
titanlite.register_dataset("digit_images", Digits, has_tokens=False, fields=fields)

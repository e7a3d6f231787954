"""A diffusion transformer (flow matching) on crops of photographs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import titanlite
from titanlite.data.images.photos import build_photos
from titanlite.parallelize import ParallelPlan

SHAPE = (3, 16, 16)


@dataclass(frozen=True)
class Sizes:
    dim: int = 64
    num_layers: int = 4
    num_heads: int = 4


class DiT(nn.Module):
    """Images [B, 3, 16, 16] mixed with noise, and times [B], to velocities [B, 3, 16, 16]."""

    def __init__(self, sizes):
        super().__init__()
        patches, positions = nn.Conv2d(3, sizes.dim, 2, stride=2), nn.Embedding(64, sizes.dim)
        self.embed = nn.ModuleDict({"patches": patches, "positions": positions})
        self.blocks = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.num_layers)})
        self.head = nn.Sequential(nn.LayerNorm(sizes.dim), nn.Linear(sizes.dim, 12, bias=False))

    def forward(self, x, time):
        if self.embed is not None:  # a later stage of a pipeline gets the output of the one before
            x = self.embed["patches"](x).flatten(2).transpose(1, 2)
            x = x + self.embed["positions"](torch.arange(64, device=x.device))
        for block in self.blocks.values():
            x = block(x, time)
        if self.head is None:
            return x
        return F.pixel_shuffle(self.head(x).transpose(1, 2).unflatten(-1, (8, 8)), 2)


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        dim, self.head_dim = sizes.dim, sizes.dim // sizes.num_heads
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, time):
        rates = torch.logspace(3, -1, x.size(-1) // 2, dtype=time.dtype, device=time.device)
        angles = time[:, None, None] * rates
        of_time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1))
        shift1, scale1, gate1, shift2, scale2, gate2 = of_time.chunk(6, dim=-1)
        y = self.norm(x) * (1 + scale1) + shift1
        q, k, v = (f(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(y)
        y = self.norm(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y)))


class Noisy:
    def __init__(self, *, split, seed, **_):
        self.crops = build_photos(split, seed=seed, height=16, width=16, channels=3, vocab_size=256)
        self.num_samples, self.seed = self.crops.num_samples, seed

    def sample(self, index):
        image = self.crops.sample(index).view(SHAPE) / 127.5 - 1
        # The same noise in each validation, whatever the seed.
        seed = self.seed * 1_000_003 + index if self.num_samples is None else -1 - index
        generator = torch.Generator().manual_seed(seed)
        noise, time = torch.randn(SHAPE, generator=generator), torch.rand((), generator=generator)
        return {"noisy": torch.lerp(image, noise, time), "time": time, "targets": noise - image}


def draw(event):
    """Follow the velocity from noise to images on every rank, and write them on rank 0."""
    x = torch.randn(16, *SHAPE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for time in torch.linspace(1, 0.02, 50):
            x = x - event.job.parts[0](x, time.expand(16)) / 50
    if event.job.world.rank == 0:
        grid = x.unflatten(0, (4, 4)).permute(0, 3, 1, 4, 2).reshape(64, 64, 3).clamp(-1, 1)
        Image.fromarray((127.5 * (grid + 1)).byte().numpy()).resize((512, 512)).save("samples.png")


styles = {f"blocks.*.{name}": ColwiseParallel() for name in ("qkv.*", "up")}
styles |= {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "down")}
sides = {"blocks": "blocks", "embeddings": ("embed",), "head": ("head",)}
PLAN = ParallelPlan(styles, **sides, sequence_dim=None)
titanlite.register_model("dit", DiT, Sizes, plan=PLAN)
fields = dict.fromkeys(("noisy", "time", "targets"))
titanlite.register_dataset("noisy_photos", Noisy, has_tokens=False, fields=fields)

# dit/model.py
import torch
import torch.nn.functional as F
from torch import nn

from .noise import noise_of, time_of


class DiT(nn.Module):
    """The velocity [B, 1, 8, 8] of each image at a random time between image and noise."""

    def __init__(self, sizes):
        super().__init__()
        self.embed = Embed(sizes.dim)
        self.blocks = nn.ModuleDict({str(i): Block(sizes) for i in range(sizes.num_layers)})
        self.head = Head(sizes.dim)

    def forward(self, image, sample_keys):
        time = time_of(image, sample_keys)
        # A later stage of a pipeline gets the output of the stage before it, not the image.
        noise = None if self.embed is None else noise_of(image, sample_keys)
        return self.velocity(image, noise, time)

    def velocity(self, x, noise, time):
        if self.embed is not None:
            x = self.embed(torch.lerp(x, noise, time[:, None, None, None]))
        for block in self.blocks.values():
            x = block(x, time)
        return x if self.head is None else self.head(x)


class Embed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, kernel_size=2, stride=2)
        self.position = nn.Parameter(torch.randn(16, dim) * 0.02)

    def forward(self, image):
        return self.patch(image).flatten(2).transpose(1, 2) + self.position


class TimeEmbedding(nn.Module):
    """Times [B] to shifts, scales and gates [B, 1, 6 * dim]."""

    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, time):
        half = torch.arange(self.dim // 2, device=time.device, dtype=time.dtype)
        angles = 1000 * time[:, None] * torch.exp(-half * (9 / len(half)))
        return self.layers(torch.cat([angles.cos(), angles.sin()], dim=-1))[:, None]


class Block(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        dim, self.head_dim = sizes.dim, sizes.dim // sizes.num_heads
        self.time = TimeEmbedding(dim)
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, time):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.time(time).chunk(6, dim=-1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (
            f(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.o(y)
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y)))


class Head(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, 4)

    def forward(self, x):
        patches = self.linear(self.norm(x)).transpose(1, 2)
        return F.pixel_shuffle(patches.unflatten(-1, (4, 4)), 2)

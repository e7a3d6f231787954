"""Self-supervised LeJEPA training of an image encoder under FSDP2: the views agree, and SIGReg makes the embeddings Gaussian.

Thread: lightly-ai/lightly issue #1920 "[BUG] SIGReg with `gather_distributed=True` produces gradient which is off by
`1/world_size` under DDP" (2026), mended by pull request #1923: the plain all_reduce isn't part of the autograd graph.
Fault: SIGReg.total adds up the characteristic functions over the ranks with dist.all_reduce, which has no backward pass; each
rank gets the gradient of its own samples in a loss divided by all samples, and FSDP2's average divides by the ranks once more.
REPAIR: `dist.all_reduce(x, group=self.group)` -> `x = dist_nn.all_reduce(x, group=self.group)`
A right first sentence says: the all-reduce of SIGReg's statistics isn't differentiable, so with FSDP2's averaging the gradient of
the regularizer is divided by the number of ranks (half of the true one), while the loss itself is right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import titanlite

VIEWS, SIZE, PATCH, WIDTH, HEADS, OUT, SLICES, ROWS = 2, 8, 4, 12, 2, 6, 10, 8
LAMBDA = 0.3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.proj(y)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.projector = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, OUT)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x)
        return self.projector(self.norm(x).mean(1))


class SIGReg:
    """Epps-Pulley statistics of random projections; with a group over the samples of all its ranks."""

    def __init__(self, group=None, points=9, largest=3.0):
        self.group = group
        self.t = torch.linspace(0, largest, points, dtype=torch.float64)
        self.phi = (-self.t.square() / 2).exp()
        weights = torch.full_like(self.t, 2 * largest / (points - 1))
        weights[[0, -1]] /= 2
        self.weights = weights * self.phi

    def total(self, x):
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def __call__(self, z, directions):
        """z: (views, samples, features)"""
        samples = z.size(1) * (1 if self.group is None else dist.get_world_size(self.group))
        projected = (z @ F.normalize(directions, dim=0)).unsqueeze(-1) * self.t
        cos = self.total(projected.cos().sum(1)) / samples
        sin = self.total(projected.sin().sum(1)) / samples
        error = (cos - self.phi).square() + sin.square()
        return (error @ self.weights).mean() * samples


def jepa_loss(model, batch, regularizer):
    views, directions = batch
    z = model(views.flatten(0, 1)).unflatten(0, views.shape[:2]).transpose(0, 1)
    agreement = (z - z.mean(0, keepdim=True)).square().mean()
    return (1 - LAMBDA) * agreement + LAMBDA * regularizer(z, directions)


def plain():
    return Encoder()


def parallel(mesh):
    model = Encoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), SIGReg(mesh.get_group("dp"))


def loss(model, batch):
    return jepa_loss(model, batch, SIGReg())


def step(built, batch):
    model, regularizer = built
    value = jepa_loss(model, batch, regularizer)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value, group=regularizer.group)
    return value / dist.get_world_size(regularizer.group)


def split(batch, mesh):
    """A rank's own images, and the directions that all ranks share."""
    views, directions = batch
    return views.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")], directions


generator = torch.Generator().manual_seed(1920)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def crops():
    images = randn(ROWS, 1, 3, SIZE, SIZE)
    return images + 0.5 * randn(ROWS, VIEWS, 3, SIZE, SIZE), randn(OUT, SLICES)


batches = [crops() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

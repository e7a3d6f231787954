"""A weather model's grid points are sharded over the model group; all its ranks have one random seed.

Thread: https://github.com/ecmwf/anemoi-core/issues/595 "Caution - Using dropout with model sharding -
Revisit random seed generation", 2025-10-09.
Wrong: each rank draws a dropout mask for its own grid points from the same seed, so all shards get the
mask of the first grid points. (The seed of a step comes with the batch, so that runs can be repeated.)
A right diagnosis says: the output of processor.dropout differs on rank 1 of model, whose input agrees:
its mask is not that part of the mask which one process draws (it repeats that of rank 0).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

FEATURES, CHANNELS, GRID = 5, 16, 12


class SeededDropout(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x, seed):  # [grid, batch, channels]
        rng = torch.Generator().manual_seed(seed)
        keep = torch.rand(x.shape, generator=rng, dtype=torch.float64) >= self.p
        return x * keep / (1 - self.p)


class GlobalMean(torch.autograd.Function):
    """the mean over all grid points, of which each rank has a shard"""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.points = group, len(x) * dist.get_world_size(group)
        total = x.sum(0)
        dist.all_reduce(total, group=group)
        return total / ctx.points

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        points = ctx.points // dist.get_world_size(ctx.group)
        return (grad / ctx.points).expand(points, *grad.shape), None


class Processor(nn.Module):
    model_group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(CHANNELS)
        self.local, self.mixing = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.dropout = SeededDropout(0.25)

    def forward(self, x, seed):
        h = self.norm(x)
        mean = h.mean(0) if self.model_group is None else GlobalMean.apply(h, self.model_group)
        h = torch.tanh(self.local(h) + self.mixing(mean))
        return x + self.dropout(h, seed)


class EncoderProcessorDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(FEATURES, CHANNELS)
        self.processor = Processor()
        self.decoder = nn.Linear(CHANNELS, FEATURES)

    def forward(self, x, seed):
        return self.decoder(self.processor(self.encoder(x), seed))


def loss(model, batch):
    return mse_loss(model(batch["now"], int(batch["seed"])), batch["next"])


def shard_grid(batch, mesh):
    n, i = mesh.size(), mesh.get_local_rank()
    shards = {name: batch[name].chunk(n)[i] for name in ("now", "next")}
    return {**shards, "seed": batch["seed"]}


def build(mesh):
    model = EncoderProcessorDecoder()
    model.processor.model_group = mesh.get_group()
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(31)
batches = [
    {
        "now": torch.randn(GRID, 3, FEATURES, generator=generator),
        "next": torch.randn(GRID, 3, FEATURES, generator=generator),
        "seed": torch.tensor(100 + step),
    }
    for step in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"model": 2}, split=shard_grid)
    print(titanlite.compare(EncoderProcessorDecoder, build, **options))

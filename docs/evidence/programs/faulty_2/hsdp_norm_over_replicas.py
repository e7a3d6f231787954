"""Gradient norm of HSDP summed over the replicas too.

Thread: https://github.com/ByteDance-Seed/VeOmni/issues/184 "fsdp2 based hsdp, caculate grad_norm error
in `clip_grad_norm`", 2025-11-10.
Wrong: the squared norms of the shards are all-reduced over all data-parallel ranks, and not over the
shard axis alone, so each shard counts once per replica.
A right diagnosis says: the gradient norm is sqrt(2) times too large (every shard is counted on both
ranks of dp_replicate), so the gradients are clipped too much; before clipping they agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import titanlite

MAX_NORM = 0.3


class Expander(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wide, self.narrow = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.narrow(nn.functional.silu(self.wide(self.norm(x))))


class Captioner(nn.Module):
    def __init__(self, words=24, dim=12):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.layers = nn.ModuleList([Expander(dim), Expander(dim)])
        self.out = nn.Linear(dim, words, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def build_parallelize_model(mesh):
    model = Captioner()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def local_norm_squared(grads):
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    return torch.stack([g.pow(2).sum() for g in local]).sum()


def clip_grad_norm(model):
    grads = [p.grad for p in model.parameters()]
    total = local_norm_squared(grads)
    if isinstance(grads[0], DTensor):
        dist.all_reduce(total)
    total = total.sqrt()
    for g in grads:
        g.mul_(torch.clamp(MAX_NORM / (total + 1e-6), max=1.0).item())
    return total


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["next"].flatten())


def split(batch, mesh):
    return {name: value.chunk(4)[dist.get_rank()] for name, value in batch.items()}


generator = torch.Generator().manual_seed(31)
batches = [
    {name: torch.randint(24, (8, 5), generator=generator) for name in ("ids", "next")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, split=split, clip=clip_grad_norm)
    options |= dict(ranks={"dp_replicate": 2, "dp_shard": 2})
    print(titanlite.compare(Captioner, build_parallelize_model, **options))

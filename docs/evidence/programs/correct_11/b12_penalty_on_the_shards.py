"""FSDP2 with a weight penalty that each rank computes on its own shards, outside of the forward pass.

Thread: of the kind facebookresearch/fairscale issue #696 "Add store weight/grad norm option" (2021), for "LARC like optimisers" and
regularization of sharded parameters.
Correct: every element of a weight is on one rank, so the gradient of the penalty of the own shard is whole, and is added to the
shard's gradient after its reduce-scatter. Only the value that is reported has to be summed over the ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss, softplus

import titanlite

INPUTS, WIDTH, OUTPUTS, PENALTY = 5, 9, 3, 0.02


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x):
        return x + self.outer(softplus(self.inner(self.norm(x))))


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.read = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.units = nn.ModuleList(Unit() for _ in range(2))

    def forward(self, x):
        x = self.lift(x)
        for unit in self.units:
            x = unit(x)
        return self.read(x)


def penalty(model):
    """Of the matrices; on the ranks, of the own rows of each."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in matrices]
    return PENALTY * sum(p.abs().pow(1.5).sum() for p in local)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"]) + penalty(model)


def parallel(mesh):
    model = Potential()
    for unit in model.units:
        fully_shard(unit, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step(model, batch):
    error = mse_loss(model(batch["x"]), batch["y"])
    error.backward()
    own = penalty(model)
    own.backward()
    whole = own.detach().clone()
    dist.all_reduce(whole)
    return error.detach() + whole


rng = torch.Generator().manual_seed(422)
batches = [
    {"x": torch.randn(8, INPUTS, generator=rng), "y": torch.randn(8, OUTPUTS, generator=rng)}
    for _ in range(3)
]
arguments = Potential, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""River runoff from rainfall by leaky reservoirs, a custom operator, in tensor and sequence parallel.

Thread: pytorch/pytorch pull request #131108 "[DTensor] add support for custom op registration" (2024):
register_sharding takes the placements that an operator accepts; its example, softmax, leaves out the dimension that
the operator runs over.
Fault: leaky_scan_sharding accepts Shard(dim) for all dimensions of x, also for time, over which leaky_scan runs.
Between SequenceParallel norms x is Shard(1), so DTensor runs it on each shard: every rank's reservoirs start empty,
and in the backward pass no gradient crosses the border.
REPAIR: `for dim in range(x.ndim):` -> `for dim in (0, 2):`
A right first sentence says: the scan of reservoir (hydro::leaky_scan) starts anew at each sequence shard over tp,
because its sharding rule accepts Shard(1), the dimension of time; the output of reservoir is wrong on the second
rank.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import titanlite

STATIONS, WIDTH, DAYS, ROWS = 4, 12, 8, 4


@torch.library.custom_op("hydro::leaky_scan", mutates_args=())
def leaky_scan(x: torch.Tensor, keep: float, backwards: bool) -> torch.Tensor:
    """out[:, t] = keep * out[:, t - 1] + x[:, t], or from the last day on."""
    out, state = torch.empty_like(x), torch.zeros_like(x[:, 0])
    days = range(x.shape[1])
    for t in reversed(days) if backwards else days:
        state = keep * state + x[:, t]
        out[:, t] = state
    return out


@leaky_scan.register_fake
def _(x, keep, backwards):
    return torch.empty_like(x)


def remember_keep(ctx, inputs, output):
    _, ctx.keep, ctx.backwards = inputs


def leaky_scan_backward(ctx, gradient):
    return leaky_scan(gradient, ctx.keep, not ctx.backwards), None, None


leaky_scan.register_autograd(leaky_scan_backward, setup_context=remember_keep)


@register_sharding(torch.ops.hydro.leaky_scan.default)
def leaky_scan_sharding(x, keep, backwards):
    acceptable = [([Replicate()], [Replicate(), None, None])]
    for dim in range(x.ndim):
        acceptable.append(([Shard(dim)], [Shard(dim), None, None]))
    return acceptable


class Reservoir(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.keep = keep

    def forward(self, x):
        return leaky_scan((1 - self.keep) * x, self.keep, False)


class Catchment(nn.Module):
    def __init__(self, keep):
        super().__init__()
        self.reservoir, self.norm = Reservoir(keep), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        stored = self.reservoir(self.norm(x))
        return x + self.down(F.silu(self.up(stored)))


class RunoffModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.rain = nn.Linear(STATIONS, WIDTH)
        self.catchments = nn.ModuleList(Catchment(keep) for keep in (0.6, 0.9))
        self.norm, self.runoff = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, rain):
        x = self.rain(rain)
        for catchment in self.catchments:
            x = catchment(x)
        return self.runoff(self.norm(x))


def plain():
    return RunoffModel()


def parallel(mesh):
    plan = {
        "rain": ColwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "catchments.*.norm": SequenceParallel(),
        "catchments.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "catchments.*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "runoff": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(RunoffModel(), mesh["tp"], plan)


def loss(model, batch):
    return F.smooth_l1_loss(model(batch["rain"]), batch["runoff"])


generator = torch.Generator().manual_seed(131108)


def seasons():
    rain = torch.randn(ROWS, DAYS, STATIONS, generator=generator, dtype=torch.float64).relu()
    river = torch.zeros(ROWS, DAYS, 2, dtype=torch.float64)
    for t in range(DAYS):
        before = river[:, t - 1] if t else 0.0
        river[:, t] = 0.8 * before + 0.4 * rain[:, t].unflatten(-1, (2, -1)).sum(-1)
    return {"rain": rain, "runoff": river}


batches = [seasons() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

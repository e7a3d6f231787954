"""Counts of insurance claims by a small Poisson network under FSDP2, trained by L-BFGS on the sharded parameters.

Thread: facebookresearch/fairscale issue #767 "What is pointwise optimizer and non-pointwise optimizer?" (2021): an
optimizer whose step needs more than the point's own gradient may differ on shards.
Correct: the two-loop recursion works on the local shards as if each rank had a problem of its own, yet all its
scalars are dot products that are all-reduced over the shards, so the step is that of the whole vector, and its length
too. A rank without elements of a parameter (shards are uneven, and the head has one row) adds zero. Whether a pair is
kept depends on reduced numbers alone and is the same everywhere. Scalars that have been reduced are multiplied into
shards and must not be reduced again. The loss needs no count: ranks have the same number of policies, and FSDP takes
the mean of means.
"""

from collections import deque

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite

COLUMNS, WIDTH, ROWS = 6, 10, 24


class Claims(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(COLUMNS, WIDTH), nn.Linear(WIDTH, WIDTH - 3)])
        self.head = nn.Linear(WIDTH - 3, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).squeeze(-1)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedLBFGS(torch.optim.Optimizer):
    """Limited memory BFGS with a limited step; the history has the shapes of the shards."""

    def __init__(self, parameters, lr=0.2, memory=3):
        super().__init__(parameters, dict(lr=lr, memory=memory))
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.pairs, self.previous = deque(maxlen=memory), None

    def dot(self, left, right):
        total = sum((a * b).sum() for a, b in zip(left, right))
        if isinstance(self.parameters[0], DTensor):
            dist.all_reduce(total, group=self.parameters[0].device_mesh.get_group())
        return total

    def direction(self, gradients):
        q, alphas = [g.clone() for g in gradients], []
        for s, y, rho in reversed(self.pairs):
            alphas.append(rho * self.dot(s, q))
            torch._foreach_sub_(q, [alphas[-1] * part for part in y])
        if self.pairs:
            s, y, rho = self.pairs[-1]
            torch._foreach_div_(q, rho * self.dot(y, y))
        for (s, y, rho), alpha in zip(self.pairs, reversed(alphas)):
            torch._foreach_add_(q, [(alpha - rho * self.dot(y, q)) * part for part in s])
        return q

    @torch.no_grad()
    def step(self, closure=None):
        points = [local(p) for p in self.parameters]
        gradients = [local(p.grad).clone() for p in self.parameters]
        if self.previous is not None:
            s = [a - b for a, b in zip(points, self.previous[0])]
            y = [a - b for a, b in zip(gradients, self.previous[1])]
            curvature = self.dot(s, y)
            if curvature > 0.01 * self.dot(s, s):
                self.pairs.append((s, y, 1 / curvature))
        self.previous = [p.clone() for p in points], gradients
        q = self.direction(gradients)
        rate = self.param_groups[0]["lr"] / (1 + self.dot(q, q).sqrt())
        for point, part in zip(points, q):
            point.sub_(rate * part)


def plain():
    return Claims()


def parallel(mesh):
    model = Claims()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def loss(model, batch):
    log_rate = model(batch["columns"]) + batch["exposure"].log()
    return (log_rate.exp() - batch["claims"] * log_rate).mean()


generator = torch.Generator().manual_seed(767)


def policies():
    columns = torch.randn(ROWS, COLUMNS, generator=generator)
    exposure = 0.2 + torch.rand(ROWS, generator=generator)
    rate = exposure * (0.5 * columns[:, 0] - 0.3 * columns[:, 1] * columns[:, 2]).exp()
    claims = torch.poisson(rate, generator=generator)
    return {"columns": columns, "exposure": exposure, "claims": claims}


batches = [policies()] * 5

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="dp", ranks={"dp": 3}, optimizer=ShardedLBFGS)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

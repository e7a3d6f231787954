"""Hybrid sharded FSDP2 training of a residual MLP with its own clip_grad_norm over local shards.

Thread: ByteDance-Seed/VeOmni issue #184 "fsdp2 based hsdp, caculate grad_norm error in `clip_grad_norm`" (2025): with
dp_replicate > 1 the reported norm is too large, because it is summed over a group that holds every shard several times.
Fault: in `clip_grad_norm`, the squared norms of the local shards are summed over fsdp_group, that is all data parallel ranks.
With hybrid sharding each shard lives on dp_replicate ranks, so the norm is sqrt(dp_replicate) times too large and the
gradients are clipped that much too small.
REPAIR: `group=state.fsdp_group` -> `group=state.dp_shard_group`
A right first sentence says: clip_grad_norm sums the squared shard norms over replicate and shard ranks instead of the shard
group alone, so the total norm is sqrt(2) too large and the clipped gradients are too small.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import titanlite

FEATURES, WIDTH, HIDDEN, LAYERS, CLASSES = 12, 16, 32, 3, 8
MAX_NORM = 0.25


@dataclass
class ParallelState:
    mesh: DeviceMesh

    def __post_init__(self):
        self.flat = self.mesh._flatten("dp")

    @property
    def dp_shard_group(self):
        return self.mesh.get_group("dp_shard")

    @property
    def fsdp_group(self):
        return self.flat.get_group()


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def parallel(mesh):
    model = Classifier()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    model.parallel_state = ParallelState(mesh)
    return model


def local_grad(parameter):
    grad = parameter.grad
    return grad.to_local() if isinstance(grad, DTensor) else grad


@torch.no_grad()
def clip_grad_norm(model):
    grads = [local_grad(p) for p in model.parameters() if p.grad is not None]
    total = torch.stack([torch.linalg.vector_norm(grad) ** 2 for grad in grads]).sum()
    state = getattr(model, "parallel_state", None)
    if state is not None:
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=state.fsdp_group)
    norm = total.sqrt()
    coefficient = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(coefficient)
    return norm


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def make_batches(steps=3, rows=16):
    generator = torch.Generator().manual_seed(184)
    return [
        (
            torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


batches = make_batches()
arguments = Classifier, parallel
options = dict(
    batches=batches,
    loss=loss,
    clip=clip_grad_norm,
    optimizer=make_optimizer,
    split={"dp_replicate": 0, "dp_shard": 0},
    ranks={"dp_replicate": 2, "dp_shard": 2},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

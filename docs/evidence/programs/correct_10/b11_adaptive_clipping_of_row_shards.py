"""FSDP2 with adaptive gradient clipping, whose norms of rows are taken on each rank's shard.

Thread: of the kind huggingface/pytorch-image-models pull request #437 "Adaptive Gradient Clipping (AGC) Impl" (2021) and
mosaicml/composer pull request #924 "Add Adaptive Gradient Clipping to Algorithms" (2022).
Correct: fully_shard cuts dimension 0, so every row of a matrix, with its norm, is on one rank as a whole. Vectors have one
norm each, which is the only one that has to be reduced.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import titanlite

INPUTS, WIDTH, CLASSES, CLIPPING, EPS = 6, 10, 5, 0.02, 1e-3


class ResidualUnit(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 15),
            nn.Linear(15, WIDTH),
        )

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.units = nn.Sequential(*(ResidualUnit() for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.units(self.stem(x)))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Net()
    for unit in model.units:
        fully_shard(unit, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def unitwise_norm(local, whole_ndim, group):
    if whole_ndim > 1:
        return local.norm(dim=1, keepdim=True)
    square = local.square().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def adaptive_clip(model):
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for p in model.parameters():
        sharded = isinstance(p, DTensor)
        group = p.device_mesh.get_group() if sharded else None
        weight, grad = (t.to_local() if sharded else t for t in (p, p.grad))
        allowed = unitwise_norm(weight, p.ndim, group).clamp(min=EPS) * CLIPPING
        length = unitwise_norm(grad, p.ndim, group)
        grad.copy_(torch.where(length > allowed, grad * (allowed / length.clamp(min=1e-6)), grad))
    return norm


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


rng = torch.Generator().manual_seed(321)
batches = [
    {"x": torch.randn(8, INPUTS, generator=rng), "y": torch.randint(CLASSES, (8,), generator=rng)}
    for _ in range(3)
]
arguments = Net, parallel
options = dict(batches=batches, loss=loss, clip=adaptive_clip, ranks={"dp": 2}, split="dp")
options["optimizer"] = make_optimizer

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

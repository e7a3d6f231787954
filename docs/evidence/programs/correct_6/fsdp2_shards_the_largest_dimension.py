"""FSDP2 that shards every weight along its largest dimension, for heads whose first dimension is small.

Thread: https://github.com/pytorch/pytorch/issues/137342 "Allow sharding for a tensor for FSDP-2 on arbitrary dim
instead of 0", 2024-10-04, and https://github.com/pytorch/pytorch/pull/137496 (shard_placement_fn).
Right: the placement is Shard(1) for wide weights and Shard(2) for the stacked heads, and FSDP2 gathers and scatters
along it.
Must not be accused: shards that are columns, as under row-wise tensor parallelism, though the axis is that of data
parallelism; weights of one module cut in other dimensions.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.functional import smooth_l1_loss

import titanlite

FEATURES, DIM, HEADS, OUT, RANKS = 6, 12, 2, 4, 3


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.nn.functional.mish(self.up(self.norm(x))))


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HEADS, OUT, DIM) / DIM**0.5)
        self.scale = nn.Parameter(torch.ones(HEADS, 1, 3))

    def forward(self, x):
        out = torch.einsum("nd,hod->hno", x, self.weight)
        return out * self.scale.mean(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.heads = nn.Linear(FEATURES, DIM), MultiHead()
        self.trunk = nn.ModuleList(Trunk() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.trunk:
            x = block(x)
        return self.heads(x).transpose(0, 1)


def largest_dimension(parameter):
    sizes = list(parameter.shape)
    return Shard(sizes.index(max(sizes)))


def loss(model, batch):
    return smooth_l1_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Net()
    for module in (*model.trunk, model.heads):
        fully_shard(module, mesh=mesh["dp"], shard_placement_fn=largest_dimension)
    return fully_shard(model, mesh=mesh["dp"], shard_placement_fn=largest_dimension)


generator = torch.Generator().manual_seed(137342)
batches = [
    {
        "x": torch.randn(6, FEATURES, generator=generator),
        "y": torch.randn(6, HEADS, OUT, generator=generator),
    }
    for _ in range(3)
]
arguments = Net, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": RANKS}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A distributed sampler that repeats samples until all ranks have as many.

Thread: https://github.com/pytorch/pytorch/issues/25162 "Incorrect Validation Accuracy Due to Distributed
Sampler", 2019-08-25.
Wrong (for equality with one process): the global batch has 7 samples; the sampler adds sample 0 again,
on the last rank.
A right diagnosis says: the ranks together train on a sample twice: sample 0 counts twice (rank 1 has it
too), all others once, and the mean is over 8 rows instead of 7.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import smooth_l1_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite


class DistributedSampler:
    def __init__(self, length, num_replicas, rank):
        self.length, self.num_replicas, self.rank = length, num_replicas, rank
        self.num_samples = math.ceil(length / num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __iter__(self):
        indices = list(range(self.length))
        indices += indices[: self.total_size - len(indices)]
        return iter(indices[self.rank : self.total_size : self.num_replicas])


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(9, 18), nn.ELU(), nn.LayerNorm(18))
        self.mean = nn.Linear(18, 3)

    def forward(self, x):
        return self.mean(self.features(x))


def load(batch, mesh):
    sampler = DistributedSampler(len(batch["x"]), dist.get_world_size(), dist.get_rank())
    indices = list(sampler)
    return {name: value[indices] for name, value in batch.items()}


def loss(model, batch):
    return smooth_l1_loss(model(batch["x"]), batch["y"])


def build():
    return DistributedDataParallel(Regressor())


generator = torch.Generator().manual_seed(251)
batches = [
    {"x": torch.randn(7, 9, generator=generator), "y": torch.randn(7, 3, generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(Regressor, build, batches=batches, loss=loss, ranks={"dp": 2}, split=load)
    )

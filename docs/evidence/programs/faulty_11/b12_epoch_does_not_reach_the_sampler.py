"""DDP with a loader whose batch sampler wraps the sampler that shuffles: the trainer tells each epoch's number to the wrapper.

Thread: Lightning-AI/pytorch-lightning issue #13316 "set_epoch not called for BatchSampler" (2022) and pytorch/pytorch issue
#31771 "DistributedSampler can't shuffle the dataset" (2020).
Fault: in announce, only a batch sampler with set_epoch is told; torch's has none, and the sampler in it stays in epoch 0.
REPAIR: `getattr(loader.batch_sampler, "set_epoch", None)` -> `getattr(loader.batch_sampler.sampler, "set_epoch", None)`
A right first sentence says: the first epoch (steps 1 and 2) agrees; from step 3, the first step of the second epoch, on, the ranks
train on other rows than one process (the inputs of encoder are those of step 1 again), as the sampler's epoch is never set and
each epoch has the order of the first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, silu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler

import titanlite

SAMPLES, FEATURES, BATCH = 16, 5, 8


def order(epoch):
    generator = torch.Generator().manual_seed(1000 + epoch)
    return torch.randperm(SAMPLES, generator=generator).tolist()


class ShuffledSampler:
    """Of each epoch's permutation, a rank takes every n-th sample."""

    def __init__(self, rank, size):
        self.rank, self.size, self.epoch = rank, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(order(self.epoch)[self.rank :: self.size])

    def __len__(self):
        return SAMPLES // self.size


class Loader:
    def __init__(self, rank, size):
        sampler = ShuffledSampler(rank, size)
        self.batch_sampler = BatchSampler(sampler, BATCH // size, drop_last=True)
        self.rows = iter(())

    def next(self, data):
        rows = next(self.rows)
        return {name: data[name][rows] for name in ("x", "y")}


def announce(loader, epoch):
    set_epoch = getattr(loader.batch_sampler, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 12), nn.LayerNorm(12), nn.SiLU())
        self.inner, self.out = nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, x):
        x = self.encoder(x)
        return self.out(x + silu(self.inner(x)))


def loss(model, batch):
    """Of the batch's number `index` in its epoch."""
    first = int(batch["index"]) * BATCH
    rows = order(int(batch["epoch"]))[first : first + BATCH]
    return mse_loss(model(batch["x"][rows]), batch["y"][rows])


def parallel(mesh):
    model = DistributedDataParallel(Surrogate(), process_group=mesh.get_group("dp"))
    return model, Loader(dist.get_rank(), dist.get_world_size())


def step(built, data):
    model, loader = built
    if int(data["index"]) == 0:
        announce(loader, int(data["epoch"]))
        loader.rows = iter(loader.batch_sampler)
    batch = loader.next(data)
    value = mse_loss(model(batch["x"]), batch["y"])
    value.backward()
    return value


rng = torch.Generator().manual_seed(412)
dataset = {
    "x": torch.randn(SAMPLES, FEATURES, generator=rng),
    "y": torch.randn(SAMPLES, 2, generator=rng),
}
batches = [
    {**dataset, "epoch": torch.tensor(epoch), "index": torch.tensor(index)}
    for epoch in range(2)
    for index in range(SAMPLES // BATCH)
]
arguments = Surrogate, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

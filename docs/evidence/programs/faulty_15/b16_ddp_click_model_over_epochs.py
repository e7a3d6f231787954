"""A click-through-rate model with embedding tables and feature crosses under DDP; each step is an epoch over a small table.

Thread: NVlabs/LongLive issue #71 "DDP training ranks use divergent DistributedSampler seeds" (2026): the seed of the sampler
depended on the rank, so each rank shuffled in another way, and the ranks' parts overlapped and left out other samples.
Fault: EpochLoader gives DistributedSampler the seed of the rank (config seed plus rank), so the ranks take their slices of
different permutations; some rows are read by more than one rank and some by none.
REPAIR: `self.seed = seed_everything(SEED, self.rank)` -> `self.seed = SEED`
A right first sentence says: the ranks' samplers shuffle with different seeds, so the ranks' rows aren't a partition of the batch:
some rows are used twice or more and others not at all.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import titanlite

SEED, RANKS, ROWS = 20, 3, 18
TABLES, DENSE, WIDTH = (11, 7, 5), 4, 6


class CrossLayer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x0, x):
        return x0 * self.linear(x) + x


class ClickModel(nn.Module):
    """Deep and cross network: x0 * (W x + b) + x, beside an MLP."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in TABLES)
        self.dense = nn.Sequential(nn.Linear(DENSE, WIDTH), nn.ReLU())
        size = WIDTH * (len(TABLES) + 1)
        self.crosses = nn.ModuleList(CrossLayer(size) for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(size, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.click = nn.Linear(size + 8, 1)

    def forward(self, dense, sparse):
        columns = [table(column) for table, column in zip(self.tables, sparse.unbind(1))]
        x0 = torch.cat([self.dense(dense), *columns], dim=1)
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        return self.click(torch.cat([x, self.deep(x0)], dim=1)).squeeze(1)


class Impressions(Dataset):
    def __init__(self, table):
        self.dense, self.sparse, self.clicks = table["dense"], table["sparse"], table["clicks"]

    def __len__(self):
        return len(self.clicks)

    def __getitem__(self, index):
        return {
            "dense": self.dense[index],
            "sparse": self.sparse[index],
            "clicks": self.clicks[index],
        }


def seed_everything(seed, rank):
    """Each rank gets its own stream of random numbers, for dropout and negative sampling."""
    torch.manual_seed(seed + rank)
    return seed + rank


class EpochLoader:
    def __init__(self, table, rank, world):
        self.rank, self.world = rank, world
        self.seed = seed_everything(SEED, self.rank)
        dataset = Impressions(table)
        self.sampler = DistributedSampler(
            dataset,
            num_replicas=self.world,
            rank=self.rank,
            shuffle=True,
            seed=self.seed,
            drop_last=True,
        )
        self.loader = DataLoader(
            dataset, batch_size=len(dataset) // self.world, sampler=self.sampler, drop_last=True
        )

    def epoch(self, number):
        self.sampler.set_epoch(number)
        return next(iter(self.loader))


def plain():
    return ClickModel()


def parallel(mesh):
    return DistributedDataParallel(ClickModel(), process_group=mesh.get_group("dp"))


def split(batch, mesh):
    loader = EpochLoader(batch, mesh.get_local_rank("dp"), mesh.size())
    return loader.epoch(int(batch["epoch"]))


def loss(model, batch):
    logits = model(batch["dense"], batch["sparse"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicks"])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    value = value.detach()
    dist.all_reduce(value)
    return value / dist.get_world_size()


generator = torch.Generator().manual_seed(71)


def impressions(epoch):
    return {
        "dense": torch.randn(ROWS, DENSE, generator=generator, dtype=torch.float64),
        "sparse": torch.stack(
            [torch.randint(0, size, (ROWS,), generator=generator) for size in TABLES], dim=1
        ),
        "clicks": torch.randint(0, 2, (ROWS,), generator=generator).double(),
        "epoch": torch.tensor(epoch),
    }


batches = [impressions(epoch) for epoch in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": RANKS},
    optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

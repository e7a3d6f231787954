"""A DLRM click model: the MLPs under DDP, the embedding tables cut by columns over the ranks and left out of DDP.

Thread: meta-pytorch/torchrec issue #2251 "TorchRec divides the Row-Wise dgrad passed to FBGEMM_GPU by world_size" (2024), on the
division of the gradients which go back to sharded tables.
Correct because: each rank looks up its columns for the rows of all ranks, so a table's gradient is the sum over the ranks of the
gradients of their mean losses; the backward pass of the exchange divides by the number of ranks, which makes it the gradient of
the mean over the whole batch, as DDP does for the MLPs. The tables' gradients need no all-reduce, as each rank alone holds its
columns and has seen all rows.
"""

from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import titanlite

TABLES, DENSE, WIDTH, HOTS = (17, 23, 11), 5, 6, 3


def mlp(*sizes):
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class SumPooledTable(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, WIDTH) * WIDTH**-0.5)

    def forward(self, ids):
        return F.embedding(ids, self.weight).sum(1)


class ExchangeColumns(torch.autograd.Function):
    """From the own columns of all rows to all columns of the own rows; divides the gradient by the number of ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = list(x.chunk(dist.get_world_size()))
        got = [torch.empty_like(parts[0]) for _ in parts]
        dist.all_to_all(got, [part.contiguous() for part in parts])
        return torch.cat(got, dim=-1)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(dist.get_world_size(), dim=-1)]
        got = [torch.empty_like(part) for part in parts]
        dist.all_to_all(got, parts)
        return torch.cat(got) / dist.get_world_size()


class ColumnShardedTable(nn.Module):
    def __init__(self, table, mesh):
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(table.weight.detach(), mesh, [Shard(1)]))

    def forward(self, ids):
        everyones = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, ids.contiguous())
        pooled = F.embedding(torch.cat(everyones), self.weight.to_local()).sum(1)
        return ExchangeColumns.apply(pooled)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(SumPooledTable(rows) for rows in TABLES)
        self.bottom = mlp(DENSE, 16, WIDTH)
        pairs = len(TABLES) * (len(TABLES) + 1) // 2
        self.top = mlp(WIDTH + pairs, 16, 1)

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        features = [x] + [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        rows, columns = torch.tril_indices(len(features), len(features), offset=-1)
        return self.top(torch.cat([x, products[:, rows, columns]], dim=-1)).squeeze(-1)


def plain():
    return DLRM()


def parallel(mesh):
    model = DLRM()
    for index, table in enumerate(model.tables):
        model.tables[index] = ColumnShardedTable(table, mesh)
    sharded = [name for name, _ in model.named_parameters() if name.startswith("tables.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
    return DistributedDataParallel(model)


def loss(model, batch):
    dense, sparse, clicks = batch
    return F.binary_cross_entropy_with_logits(model(dense, sparse), clicks)


generator = torch.Generator().manual_seed(2251)


def impressions(number=12):
    dense = torch.randn(number, DENSE, generator=generator, dtype=torch.float64)
    sparse = [torch.randint(0, rows, (number, HOTS), generator=generator) for rows in TABLES]
    clicks = torch.randint(0, 2, (number,), generator=generator).double()
    return dense, torch.stack(sparse, dim=1), clicks


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    return value.detach()


batches = [impressions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

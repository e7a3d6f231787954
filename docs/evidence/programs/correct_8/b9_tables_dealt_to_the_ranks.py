"""DLRM's hybrid parallelism: embedding tables are dealt to the ranks in turn, the dense layers are data-parallel.

Thread: of the kind meta-pytorch/torchrec issue #602 "table-wise sharding" (2022) and #1388 "Best way to shard model with more
than one EmbeddingCollection" (2023).
Correct: a rank looks up its tables for the rows of all ranks and sends the vectors to the rows' ranks. What arrives is
ordered by rank, and the tables are put back into their order. A table's gradient comes from all rows, so it is divided by
the number of ranks but not reduced.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import titanlite

TABLES, ROWS, DIM, DENSE = 4, 10, 6, 5


def exchange(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x.contiguous())
    return out


class AllToAll(torch.autograd.Function):
    """Piece i of the rows goes to rank i; the pieces that come are in the order of the ranks."""

    @staticmethod
    def forward(ctx, x):
        return exchange(x)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient)


class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ModuleDict({str(t): nn.Embedding(ROWS, DIM) for t in range(TABLES)})

    def forward(self, ids):
        return torch.stack([self.weights[str(t)](ids[:, t]) for t in range(TABLES)], 1)


class DealtTables(Tables):
    def keep(self, rank, n):
        for t in range(TABLES):
            if t % n != rank:
                del self.weights[str(t)]

    def forward(self, ids):
        n = dist.get_world_size()
        everyone = [torch.empty_like(ids) for _ in range(n)]
        dist.all_gather(everyone, ids.contiguous())
        everyone = torch.cat(everyone)
        own = torch.stack([table(everyone[:, int(t)]) for t, table in self.weights.items()], 1)
        came = AllToAll.apply(own).unflatten(0, (n, len(ids)))
        # came[r, row, k] is table k * n + r
        return came.permute(1, 2, 0, 3).flatten(1, 2)


class Dlrm(nn.Module):
    def __init__(self, tables=Tables):
        super().__init__()
        self.tables = tables()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, DIM))
        pairs = TABLES * (TABLES + 1) // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense, ids):
        x = self.bottom(dense)
        features = torch.cat([x[:, None], self.tables(ids)], 1)
        products = features @ features.transpose(1, 2)
        i, j = torch.triu_indices(TABLES + 1, TABLES + 1, 1)
        return self.top(torch.cat([x, products[:, i, j]], 1))[:, 0]


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch["dense"], batch["ids"]), batch["click"])


def parallel(mesh):
    model = Dlrm(DealtTables)
    model.tables.keep(mesh.get_local_rank("world"), mesh["world"].size())
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if not name.startswith("tables."):
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(134)


def draw():
    return {
        "dense": torch.randn(12, DENSE, generator=generator),
        "ids": torch.randint(ROWS, (12, TABLES), generator=generator),
        "click": torch.randint(2, (12,), generator=generator).float(),
    }


batches = [draw() for _ in range(3)]
arguments = Dlrm, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"world": 2}, split="world")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

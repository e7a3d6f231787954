"""A click model (DLRM style) whose embedding tables lie on single ranks while the rest is data parallel, on uneven batches.

Correct because: each rank divides the sum of its losses by the number of rows of the whole batch, so the full gradient is the
sum over the ranks. The gradients of the dense layers are summed by an all-reduce and not averaged. A table lies on one rank,
which looks up the rows for all ranks; the backward pass of the exchange brings it the gradients of all ranks, and index_add of
the embedding sums them, so the tables need no reduction. The ranks have 5 and 3 rows; the exchange uses these sizes.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

DENSE, WIDTH, ROWS, SIZES, HOT = 4, 8, (5, 3), (11, 7, 13, 9), 2


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict(
            {str(i): nn.EmbeddingBag(size, WIDTH, mode="sum") for i, size in enumerate(SIZES)}
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        pairs = (len(SIZES) + 1) * len(SIZES) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def lookup(self, ids):
        """The pooled vectors of the tables held here: rows, tables, WIDTH."""
        return torch.stack([table(ids[:, int(i)]) for i, table in self.tables.items()], dim=1)

    def interact(self, dense, pooled):
        x = self.bottom(dense)
        vectors = torch.cat([x.unsqueeze(1), pooled], dim=1)
        first, second = torch.triu_indices(len(SIZES) + 1, len(SIZES) + 1, offset=1)
        products = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([x, products], dim=1)).squeeze(-1)

    def forward(self, dense, ids):
        return self.interact(dense, self.lookup(ids))


def exchange(x, sent, received):
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent)
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.sizes = sent, received
        return exchange(x, sent, received)

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.sizes
        return exchange(grad, received, sent), None, None


class HybridClickModel(ClickModel):
    def __init__(self):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        per_rank = len(SIZES) // world
        for i in range(len(SIZES)):
            if i // per_rank != rank:
                del self.tables[str(i)]

    def forward(self, dense, ids):
        rank, world = dist.get_rank(), dist.get_world_size()
        everyones = [ids.new_empty(rows, *ids.shape[1:]) for rows in ROWS]
        for source, part in enumerate(everyones):
            if source == rank:
                part.copy_(ids)
            dist.broadcast(part, source)
        pooled = self.lookup(torch.cat(everyones))
        mine = Exchange.apply(pooled, list(ROWS), [len(ids)] * world)
        return self.interact(dense, torch.cat(mine.chunk(world), dim=1))

    def reduce_dense_gradients(self):
        for parameter in (*self.bottom.parameters(), *self.top.parameters()):
            dist.all_reduce(parameter.grad)


def plain():
    return ClickModel()


def parallel(mesh):
    return HybridClickModel()


def loss(model, batch):
    dense, ids, clicks = batch
    return F.binary_cross_entropy_with_logits(model(dense, ids), clicks)


def step(model, batch):
    dense, ids, clicks = batch
    value = F.binary_cross_entropy_with_logits(model(dense, ids), clicks, reduction="sum")
    value = value / sum(ROWS)
    value.backward()
    model.reduce_dense_gradients()
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def split(batch, mesh):
    return tuple(tensor.split(ROWS)[mesh.get_local_rank("dp")] for tensor in batch)


generator = torch.Generator().manual_seed(17)


def impressions():
    number = sum(ROWS)
    ids = [torch.randint(0, size, (number, HOT), generator=generator) for size in SIZES]
    return (
        torch.randn(number, DENSE, generator=generator, dtype=torch.float64),
        torch.stack(ids, dim=1),
        torch.randint(0, 2, (number,), generator=generator).double(),
    )


batches = [impressions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

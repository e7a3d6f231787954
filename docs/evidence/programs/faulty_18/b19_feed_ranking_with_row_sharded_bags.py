"""A click model for a feed: embedding bags cut by rows over the ranks, a dense part in data parallel over the same ranks.

Thread: meta-pytorch/torchrec issue #2362 "[BUG] EBC Mean pooling division is not handled properly." (2024): with row-wise
sharding the kernel divides by the local bag size and the output distribution sums, so bags that lie on several devices are wrong.
Fault: RowShardedBag.pool divides the sum of a rank's own rows by the number of the bag's ids which the rank owns; the pooled
parts are then summed over the ranks, so a bag with ids on several ranks becomes a sum of means.
REPAIR: `sizes = mine.sum(1, keepdim=True)` -> `sizes = (ids >= 0).sum(1, keepdim=True)`
A right first sentence says: each rank takes the mean over only those ids of a bag that lie in its own rows of the table, before
the parts are summed, instead of dividing by the size of the whole bag; pooled embeddings and all gradients are off.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

ITEMS, TOPICS, DIM, DENSE, ROWS, HISTORY = 24, 12, 6, 5, 8, 6


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


class SumAndScatter(torch.autograd.Function):
    """Adds the ranks' parts and gives each rank the rows of its own batch."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        # every rank's loss is a mean over its own rows: the table needs the mean over the ranks
        return gathered(grad, ctx.group) / dist.get_world_size(ctx.group), None


class MeanBag(nn.Module):
    """The mean of the embeddings of a bag; ids below zero are padding."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, DIM) * 0.5)

    def forward(self, ids):
        valid = (ids >= 0).unsqueeze(-1)
        rows = F.embedding(ids.clamp(min=0), self.weight) * valid
        return rows.sum(1) / valid.sum(1).clamp(min=1)


class RowShardedBag(nn.Module):
    """Keeps a block of rows; looks up what the whole group needs from it."""

    def __init__(self, bag, group):
        super().__init__()
        self.group, rank = group, dist.get_rank(group)
        shard = bag.weight.detach().chunk(dist.get_world_size(group))[rank].clone()
        self.weight, self.first = nn.Parameter(shard), rank * len(shard)

    def pool(self, ids):
        local = ids - self.first
        mine = (ids >= 0) & (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(mine, 0), self.weight) * mine.unsqueeze(-1)
        sizes = mine.sum(1, keepdim=True)
        return rows.sum(1) / sizes.clamp(min=1)

    def forward(self, ids):
        return SumAndScatter.apply(self.pool(gathered(ids, self.group)), self.group)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleDict({"history": MeanBag(ITEMS), "topics": MeanBag(TOPICS)})
        self.bottom = nn.Sequential(nn.Linear(DENSE, 8), nn.ReLU(), nn.Linear(8, DIM))
        self.top = nn.Sequential(nn.Linear(DIM + 3, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, batch):
        dense = self.bottom(batch["dense"])
        vectors = [dense] + [bag(batch[name]) for name, bag in self.bags.items()]
        products = [vectors[i] @ vectors[j].mT for i, j in ((0, 1), (0, 2), (1, 2))]
        products = torch.stack([p.diagonal() for p in products], dim=1)
        return self.top(torch.cat([dense, products], dim=1)).squeeze(1)


def shard_tables(model, group):
    for name in list(model.bags):
        model.bags[name] = RowShardedBag(model.bags[name], group)
    return model


def dense_parameters(model):
    return [*model.bottom.parameters(), *model.top.parameters()]


def plain():
    return Ranker()


def parallel(mesh):
    return shard_tables(Ranker(), mesh.get_group("dp"))


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["clicked"])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    ranks = dist.get_world_size()
    for parameter in dense_parameters(model):
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / ranks


generator = torch.Generator().manual_seed(2362)


def bags(ids, longest):
    drawn = torch.randint(0, ids, (ROWS, longest), generator=generator)
    sizes = torch.randint(1, longest + 1, (ROWS, 1), generator=generator)
    return drawn.masked_fill(torch.arange(longest) >= sizes, -1)


def impressions():
    return {
        "dense": torch.randn(ROWS, DENSE, generator=generator, dtype=torch.float64),
        "history": bags(ITEMS, HISTORY),
        "topics": bags(TOPICS, 3),
        "clicked": torch.randint(0, 2, (ROWS,), generator=generator).double(),
    }


batches = [impressions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

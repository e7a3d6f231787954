"""A recommender of baskets whose tables are cut in blocks of rows, with sparse gradients and exchanged ids.

Thread: pytorch/torchrec issue #2066 "row wise model parallelism and table wise parallelism" (2024): ids are bucketized
to the ranks of their rows and sent by all-to-all, the pooled rows come back by reduce-scatter.
Correct: each rank adds up, for every basket of all ranks, the rows that it holds; the reduce-scatter adds up the ranks'
sums and hands each rank its own baskets. A block has ceil(rows / ranks) rows, the last one fewer; ids repeat and the
sparse gradients are uncoalesced until the optimizer sees them. Backward gathers the gradients of all baskets and
divides by the number of ranks, as each rank's loss is a mean over its own baskets ("gradient division"); the dense
parameters' gradients are averaged after backward. A rank may well get no id for some basket, or none at all.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

ITEMS, SHOPS, WIDTH, BASKETS, LONGEST, FEATURES = 50, 11, 12, 12, 6, 5
WORLD = 3


class ReduceScatterPooled(torch.autograd.Function):
    """Sums for the baskets of all ranks in, sums for the own baskets out."""

    @staticmethod
    def forward(ctx, pooled):
        out = pooled.new_empty(len(pooled) // dist.get_world_size(), *pooled.shape[1:])
        dist.reduce_scatter_tensor(out, pooled.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        world = dist.get_world_size()
        whole = grad.new_empty(len(grad) * world, *grad.shape[1:])
        dist.all_gather_into_tensor(whole, grad.contiguous())
        return whole / world


def new_table(rows):
    return nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True, include_last_offset=True)


class RowWiseTable(nn.Module):
    """The rows of one block; `weight` is its part of the whole table's."""

    def __init__(self, table):
        super().__init__()
        self.block = -(-table.num_embeddings // dist.get_world_size())
        start = self.block * dist.get_rank()
        self.weight = nn.Parameter(table.weight.detach()[start : start + self.block].clone())

    def send_ids(self, ids, offsets):
        """All ranks' ids of this block with offsets by basket, ordered by rank and basket."""
        world = dist.get_world_size()
        lengths = offsets.diff()
        basket = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        owner = ids // self.block
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner * len(lengths) + basket, minlength=world * len(lengths))
        counts_here = torch.empty_like(counts)
        dist.all_to_all_single(counts_here, counts)
        sends, receives = (c.view(world, -1).sum(1).tolist() for c in (counts, counts_here))
        ids_here = ids.new_empty(sum(receives))
        dist.all_to_all_single(ids_here, ids[order] % self.block, receives, sends)
        return ids_here, F.pad(counts_here.cumsum(0), (1, 0))

    def forward(self, ids, offsets):
        ids, offsets = self.send_ids(ids, offsets)
        pooled = F.embedding_bag(
            ids, self.weight, offsets, mode="sum", sparse=True, include_last_offset=True
        )
        return ReduceScatterPooled.apply(pooled)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.shops = new_table(ITEMS), new_table(SHOPS)
        self.bottom = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        vectors = [
            self.bottom(batch["features"]),
            self.items(*jagged(batch["basket"])),
            self.items(*jagged(batch["candidate"][:, None])),
            self.shops(*jagged(batch["shops"])),
        ]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.mT)
        rows, columns = torch.triu_indices(4, 4, offset=1)
        x = torch.cat([vectors[0], products[:, rows, columns]], dim=1)
        return self.top(x).squeeze(-1)


def jagged(padded):
    """Ids without the padding and the offsets of the baskets."""
    kept = padded >= 0
    return padded[kept], F.pad(kept.sum(1).cumsum(0), (1, 0))


def plain():
    return Recommender()


def parallel():
    model = Recommender()
    model.items, model.shops = RowWiseTable(model.items), RowWiseTable(model.shops)
    return model


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["bought"])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for module in (model.bottom, model.top):
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return value.detach()


def shard(name):
    if name in ("items.weight", "shops.weight"):
        return 0, dist.get_rank(), WORLD
    return None


generator = torch.Generator().manual_seed(2066)


def ids(count, longest):
    """Popular ids are small; the lengths go from 0 to the longest."""
    drawn = torch.rand(BASKETS, longest, generator=generator, dtype=torch.float64) ** 3 * count
    lengths = torch.randint(0, longest + 1, (BASKETS, 1), generator=generator)
    return drawn.long().masked_fill(torch.arange(longest) >= lengths, -1)


def visits():
    features = torch.randn(BASKETS, FEATURES, generator=generator, dtype=torch.float64)
    bought = torch.randint(0, 2, (BASKETS,), generator=generator).double()
    candidate = torch.randint(0, ITEMS, (BASKETS,), generator=generator)
    baskets = {"basket": ids(ITEMS, LONGEST), "shops": ids(SHOPS, 2)}
    return {"features": features, "bought": bought, "candidate": candidate, **baskets}


arguments = plain, parallel
options = dict(
    batches=[visits() for _ in range(3)],
    loss=loss,
    step=step,
    split="world",
    ranks=WORLD,
    shard=shard,
    optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.02, eps=1e-8),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

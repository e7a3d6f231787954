"""A ranking model of dishes whose embedding bags are cut by rows over the ranks, in the manner of torchrec.

Thread: alibaba/TorchEasyRec pull request #134 "[bugfix] fix feature permute when use mc-ebc and mean pooling" (2025),
after which its input_dist says "we should permute features in mc-ebc before mean pooling callback", as torchrec does:
the divisor is to be in the order of the sharding groups (here those of mean and of sum pooling).
Fault: ShardedBags.forward makes the divisor of the lengths in the order of the configuration, and divides by it the
pooled vectors in the order of the groups, so that bags are divided by the lengths of other features.
REPAIR: `self.divisor(lengths)` -> `self.divisor(permuted[1])`
A right first sentence says: the output of ShardedBags is wrong because the mean pooling's divisor comes from the
lengths in the original order of the features while the pooled vectors are in the permuted order (of the groups).
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

WIDTH, LONGEST, NUMBERS, ROWS = 6, 5, 4, 12
NAMES = ["city", "ordered", "cuisine", "viewed", "coupons"]
POOLING, ITEMS = ["sum", "mean", "sum", "mean", "mean"], [8, 20, 12, 20, 8]


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({n: nn.Embedding(i, WIDTH) for n, i in zip(NAMES, ITEMS)})

    def forward(self, ids, lengths):
        inside = torch.arange(LONGEST) < lengths.unsqueeze(-1)
        bags = []
        for i, name in enumerate(NAMES):
            bag = (self.tables[name](ids[:, i]) * inside[:, i].unsqueeze(-1)).sum(1)
            bags.append(bag / lengths[:, i : i + 1] if POOLING[i] == "mean" else bag)
        return torch.stack(bags, dim=1)


class PooledReduceScatter(torch.autograd.Function):
    """Sums the ranks' partial bags of all rows and keeps the own rows."""

    @staticmethod
    def forward(ctx, pooled, group):
        ctx.group = group
        pooled = pooled.contiguous()
        dist.all_reduce(pooled, group=group)
        return pooled.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group) / ctx.group.size(), None


def gathered(own, group):
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts)


class ShardedBags(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        self.group, self.tables = group, nn.ModuleDict()
        for name in NAMES:
            own = whole.tables[name].weight.detach().chunk(group.size())[group.rank()]
            self.tables[name] = nn.Embedding.from_pretrained(own.clone(), freeze=False)
        self.order = sorted(range(len(NAMES)), key=lambda i: POOLING[i])
        self.restore = [self.order.index(i) for i in range(len(NAMES))]
        self.is_mean = torch.tensor([POOLING[i] == "mean" for i in self.order])

    def lookup(self, ids, lengths):
        inside = torch.arange(LONGEST) < lengths.unsqueeze(-1)
        bags = []
        for i, feature in enumerate(self.order):
            table = self.tables[NAMES[feature]]
            rows = ids[:, i] - self.group.rank() * table.num_embeddings
            mine = inside[:, i] & (rows >= 0) & (rows < table.num_embeddings)
            bags.append((table(rows.where(mine, 0)) * mine.unsqueeze(-1)).sum(1))
        return torch.stack(bags, dim=1)

    def divisor(self, lengths):
        return torch.where(self.is_mean, lengths, 1).unsqueeze(-1)

    def forward(self, ids, lengths):
        permuted = ids[:, self.order], lengths[:, self.order]
        pooled = self.lookup(*(gathered(part, self.group) for part in permuted))
        pooled = PooledReduceScatter.apply(pooled, self.group) / self.divisor(lengths)
        return pooled[:, self.restore]


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        fields = len(NAMES) + 1
        self.pairs = torch.triu_indices(fields, fields, offset=1)
        self.numbers = nn.Linear(NUMBERS, WIDTH)
        self.first, self.last = nn.Linear(self.pairs.size(1), 16), nn.Linear(16, 1)

    def forward(self, numbers, bags):
        vectors = torch.cat((self.numbers(numbers).unsqueeze(1), bags), dim=1)
        products = (vectors @ vectors.mT)[:, self.pairs[0], self.pairs[1]]
        return self.last(F.relu(self.first(products))).squeeze(-1)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.over = Bags(), Interaction()

    def forward(self, batch):
        return self.over(batch["numbers"], self.bags(batch["ids"], batch["lengths"]))


def plain():
    return Ranker()


def parallel(mesh):
    model, group = Ranker(), mesh.get_group("dp")
    model.bags = ShardedBags(model.bags, group)
    model.over = DistributedDataParallel(model.over, process_group=group)
    return model


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["ordered"])


generator = torch.Generator().manual_seed(134)


def impressions():
    lengths = torch.randint(1, LONGEST + 1, (ROWS, len(NAMES)), generator=generator)
    ids = torch.randint(10**6, (ROWS, len(NAMES), LONGEST), generator=generator)
    ids = ids % torch.tensor(ITEMS).unsqueeze(-1)
    numbers = torch.randn(ROWS, NUMBERS, generator=generator, dtype=torch.float64)
    ordered = (torch.rand(ROWS, generator=generator) < 0.4).double()
    return {"ids": ids, "lengths": lengths, "numbers": numbers, "ordered": ordered}


batches = [impressions() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="dp", ranks={"dp": 2})
options["shard"] = lambda name: (0, "dp") if ".tables." in name else None
options["rename"] = lambda name: name.replace("over.module.", "over.")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

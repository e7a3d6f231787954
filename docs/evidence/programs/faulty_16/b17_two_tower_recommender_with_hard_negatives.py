"""A two-tower recommender under DDP, trained on in-batch negatives of all ranks and on sampled hard negatives.

Thread: huggingface/sentence-transformers pull request #3453 "Patch `gather_across_devices` for in-batch negatives losses" (2025):
the labels took it that all positives come first, PPPPNNNN, but the ranks' candidates are gathered as PNPNPNPN, so queries were
trained towards hard negatives.
Fault: InBatchSoftmax.forward starts the labels of a rank at rank times its number of queries, but each rank puts positives and
hard negatives into the gathered candidates; from the second rank on the labels point at hard negatives and wrong items.
REPAIR: `start = dist.get_rank() * len(queries)` -> `start = dist.get_rank() * len(candidates)`
A right first sentence says: the labels of the softmax over the gathered candidates are wrong on all ranks but the first, as their
offset counts only the queries of the ranks before and not the hard negatives which those ranks also gathered.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

import titanlite

USERS, ITEMS, CATEGORIES, WIDTH, NEGATIVES = 40, 60, 7, 8, 2


class UserTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, WIDTH)
        self.history = nn.EmbeddingBag(ITEMS, WIDTH, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, users, history):
        x = torch.cat([self.user(users), self.history(history)], dim=-1)
        return F.normalize(self.mlp(x), dim=-1)


class ItemTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.category = nn.Embedding(ITEMS, WIDTH), nn.Embedding(CATEGORIES, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def forward(self, items):
        x = torch.cat([self.item(items), self.category(items % CATEGORIES)], dim=-1)
        return F.normalize(self.mlp(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = UserTower(), ItemTower()

    def forward(self, batch):
        """The queries, and as candidates first the positives and then the hard negatives."""
        queries = self.users(batch["users"], batch["history"])
        items = torch.cat([batch["positives"], batch["negatives"].flatten()])
        return queries, self.items(items)


class InBatchSoftmax(nn.Module):
    def __init__(self, scale=10.0, gather_across_devices=False):
        super().__init__()
        self.scale, self.gather_across_devices = scale, gather_across_devices

    def forward(self, queries, candidates):
        pool, start = candidates, 0
        if self.gather_across_devices:
            pool = torch.cat(all_gather(candidates))
            start = dist.get_rank() * len(queries)
        labels = torch.arange(start, start + len(queries), device=queries.device)
        return F.cross_entropy(self.scale * queries @ pool.T, labels)


def plain():
    return TwoTower()


def parallel(mesh):
    return DistributedDataParallel(TwoTower())


def loss(model, batch):
    return InBatchSoftmax()(*model(batch))


def step(model, batch):
    value = InBatchSoftmax(gather_across_devices=True)(*model(batch))
    value.backward()
    return value.detach()


generator = torch.Generator().manual_seed(3453)


def interactions(number=12):
    def draw(limit, *shape):
        return torch.randint(0, limit, shape, generator=generator)

    return {
        "users": draw(USERS, number),
        "history": draw(ITEMS, number, 5),
        "positives": draw(ITEMS, number),
        "negatives": draw(ITEMS, number, NEGATIVES),
    }


batches = [interactions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A recommender whose embedding table is cut over its rows: each rank divides a bag's sum by the ids that it holds itself.

Thread: meta-pytorch/torchrec issue #2362 "[BUG] EBC Mean pooling division is not handled properly." (2024): the keys of
a bag are on several devices, each divides by its local bag size, and the results are summed.
Wrong: a rank looks up the ids of its own rows and divides by their number. The sum over the ranks is then a sum of two
means, not the mean over all ids of the bag.
PLACE: history, forward pass, the bags whose ids lie on both ranks
KIND: mean pooling divided by each rank's own count of ids, before the sum over ranks
REPAIR: `count = mine.sum(1, keepdim=True)` -> `count = (ids >= 0).sum(1, keepdim=True)`
EXPECT: in the forward pass, history is the first module whose output differs, on all ranks, only for bags with ids on both
ranks: the sum over a rank's own ids is divided by the number of its own ids, not of all ids of the bag, and then summed
over the ranks. Divide by the count of the whole bag.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import titanlite

ITEMS, USERS, DIM, BAG, DENSE = 20, 8, 6, 3, 4


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class MeanBag(nn.Module):
    """The mean of a bag's embeddings; ids of -1 are padding."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ITEMS, DIM))

    def forward(self, ids):
        valid = (ids >= 0)[..., None]
        return (self.weight[ids.clamp(min=0)] * valid).sum(1) / valid.sum(1).clamp(min=1)


class RowWiseMeanBag(nn.Module):
    """MeanBag whose rows are cut over the ranks."""

    def __init__(self, whole, group):
        super().__init__()
        self.group = group
        rows = whole.weight.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
        self.weight = nn.Parameter(rows.clone())

    def forward(self, ids):
        local = ids - dist.get_rank(self.group) * len(self.weight)
        mine = (local >= 0) & (local < len(self.weight)) & (ids >= 0)
        pooled = (self.weight[local * mine] * mine[..., None]).sum(1)
        count = mine.sum(1, keepdim=True)
        return Reduce.apply(pooled / count.clamp(min=1), self.group)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.history = nn.Embedding(USERS, DIM), MeanBag()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 12), nn.ReLU(), nn.Linear(12, DIM))
        self.top = nn.Sequential(nn.Linear(DIM + 3, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch):
        dense = self.bottom(batch["dense"])
        features = torch.stack([dense, self.user(batch["user"]), self.history(batch["history"])], 1)
        products = features @ features.transpose(1, 2)
        pairs = torch.triu_indices(3, 3, 1)
        return self.top(torch.cat([dense, products[:, pairs[0], pairs[1]]], 1))[:, 0]


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch), batch["click"])


def parallel(mesh):
    model = Ranker()
    model.history = RowWiseMeanBag(model.history, mesh.get_group("mp"))
    return model


def shard(name):
    return (0, "mp") if name.startswith("history.") else None


generator = torch.Generator().manual_seed(121)


def draw():
    history = torch.randint(-6, ITEMS, (12, BAG), generator=generator).clamp(min=-1)
    return {
        "dense": torch.randn(12, DENSE, generator=generator),
        "user": torch.randint(USERS, (12,), generator=generator),
        "history": history,
        "click": torch.randint(2, (12,), generator=generator).float(),
    }


batches = [draw() for _ in range(3)]
arguments = Ranker, parallel
options = dict(batches=batches, loss=loss, ranks={"mp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

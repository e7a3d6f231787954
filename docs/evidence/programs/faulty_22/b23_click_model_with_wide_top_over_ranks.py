"""A click model whose wide top layers are cut by parallelize_module over the same ranks that share the rows.

Thread: pytorch/pytorch issue #119343 "Use Dtensor and ColwiseParallel api to do Tensor Parallel ..." (2024): the input
of ColwiseParallel has to be replicated; with a data parallel loader the ranks' inputs differ and it fails silently.
Fault: the plan of WideTop leaves the layouts at their defaults, though each rank comes with other rows; the row-wise
layer adds up partial results of different rows, and the ranks' sums of them are taken for the rows' scores.
REPAIR: `"up": ColwiseParallel(),` -> `"up": ColwiseParallel(input_layouts=Shard(0)),`
REPAIR: `"down": RowwiseParallel(),` -> `"down": RowwiseParallel(output_layouts=Shard(0)),`
A right first sentence says: the tensor parallel top treats the ranks' different rows (batch shards) as one replicated
input, so they aren't gathered before top.up and not scattered after top.down; rows are mixed, losses are off at once.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import titanlite

USERS, ITEMS, WORDS, DIM, DENSE, HIDDEN, ROWS, TITLE = 20, 30, 24, 6, 5, 32, 8, 4


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, DIM), nn.Embedding(ITEMS, DIM)
        self.words = nn.EmbeddingBag(WORDS, DIM, mode="mean")

    def forward(self, batch):
        return [self.users(batch["user"]), self.items(batch["item"]), self.words(batch["title"])]


class CrossLayer(nn.Module):
    """One layer of a deep and cross network."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x0, x):
        return x0 * self.linear(x) + x


class WideTop(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, HIDDEN), nn.Linear(HIDDEN, width)
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(x)))
        return self.score(x).squeeze(1)


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        width = 4 * DIM
        self.embeddings = Embeddings()
        self.bottom = nn.Sequential(nn.Linear(DENSE, 8), nn.ReLU(), nn.Linear(8, DIM))
        self.crosses = nn.ModuleList(CrossLayer(width) for _ in range(2))
        self.norm, self.top = nn.LayerNorm(width), WideTop(width)

    def forward(self, batch):
        x0 = x = torch.cat([self.bottom(batch["dense"]), *self.embeddings(batch)], dim=1)
        for cross in self.crosses:
            x = cross(x0, x)
        return self.top(self.norm(x))


def shard_top(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.top, mesh, plan)
    return model


def sum_gradients(model):
    """Of the parameters that see the own rows only; DTensors have seen all of them."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad)


def plain():
    return ClickModel()


def parallel(mesh):
    return shard_top(ClickModel(), mesh["dp"])


def loss(model, batch):
    return F.binary_cross_entropy_with_logits(model(batch), batch["clicked"])


def step(model, batch):
    value = loss(model, batch) / dist.get_world_size()
    value.backward()
    sum_gradients(model)
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


generator = torch.Generator().manual_seed(119343)


def impressions():
    user, item = (torch.randint(0, n, (ROWS,), generator=generator) for n in (USERS, ITEMS))
    return {
        "user": user,
        "item": item,
        "title": torch.randint(0, WORDS, (ROWS, TITLE), generator=generator),
        "dense": torch.randn(ROWS, DENSE, generator=generator, dtype=torch.float64),
        "clicked": ((user + item) % 3 == 0).double(),
    }


batches = [impressions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.01),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

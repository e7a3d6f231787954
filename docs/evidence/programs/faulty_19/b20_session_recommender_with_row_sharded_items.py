"""Next-item recommendation from sessions: the item table lies row-wise over the ranks, the recurrent tower runs under DDP.

Thread: meta-pytorch/torchrec pull request #1322 "Add the GRADIENT_DIVISION for sequence embedding a2a" (2023): the division of
the gradients by the number of ranks was missing for sequence embeddings, and the tests didn't notice it.
Fault: ExchangeEmbeddings.backward hands the gradients of all ranks' mean losses to the owner of a row as they are; they add
up, while DDP averages those of the tower, so the rows of the table learn with world size times the gradient.
REPAIR: `return swapped, None` -> `return swapped / dist.get_world_size(ctx.group), None`
A right first sentence says: the sharded item table's gradient is summed over the ranks' mean losses without a division by the
world size (in the backward pass of the all-to-all), so it is too large by the number of ranks, while the dense part is
averaged.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

ITEMS, WIDTH, LENGTH, CANDIDATES, SESSIONS = 36, 10, 6, 4, 8


class ExchangeEmbeddings(torch.autograd.Function):
    """Slice i of the first dimension goes to rank i; the gradients take the way back."""

    @staticmethod
    def forward(ctx, rows, group):
        ctx.group = group
        swapped = torch.empty_like(rows)
        dist.all_to_all_single(swapped, rows.contiguous(), group=group)
        return swapped

    @staticmethod
    def backward(ctx, grad):
        swapped = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(swapped, grad.contiguous(), group=ctx.group)
        return swapped, None


class RowWiseEmbedding(nn.Module):
    """Holds ITEMS / world rows and answers the lookups of every rank for them."""

    def __init__(self, table, group):
        super().__init__()
        self.group, self.world = group, dist.get_world_size(group)
        rows = table.weight.detach().chunk(self.world)
        self.first = dist.get_rank(group) * len(rows[0])
        self.weight = nn.Parameter(rows[dist.get_rank(group)].clone())

    def input_dist(self, ids):
        everyones = [torch.empty_like(ids) for _ in range(self.world)]
        dist.all_gather(everyones, ids.contiguous(), group=self.group)
        return torch.stack(everyones)

    def forward(self, ids):
        local = self.input_dist(ids) - self.first
        mine = (local >= 0) & (local < len(self.weight))
        rows = F.embedding(local.where(mine, torch.zeros_like(local)), self.weight)
        rows = rows * mine.unsqueeze(-1)
        return ExchangeEmbeddings.apply(rows, self.group).sum(0)


class SessionTower(nn.Module):
    """Reads the clicked items and how long they were looked at; scores the candidates."""

    def __init__(self):
        super().__init__()
        self.dwell = nn.Linear(1, WIDTH)
        self.gru = nn.GRU(WIDTH, 2 * WIDTH, batch_first=True)
        self.norm, self.query = nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, clicks, dwell, candidates):
        x = clicks + torch.tanh(self.dwell(dwell.unsqueeze(-1)))
        states, _ = self.gru(x)
        query = self.query(self.norm(states[:, -1]))
        return torch.einsum("bd,bcd->bc", query, candidates) + self.bias


class SessionRecommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.tower = nn.Embedding(ITEMS, WIDTH), SessionTower()

    def forward(self, clicks, dwell, candidates):
        both = self.items(torch.cat([clicks, candidates], dim=1))
        return self.tower(both[:, :LENGTH], dwell, both[:, LENGTH:])


def distribute(model, group):
    model.items = RowWiseEmbedding(model.items, group)
    model.tower = DistributedDataParallel(model.tower, process_group=group)
    return model


def loss(model, batch):
    clicks, dwell, candidates, clicked = batch
    scores = model(clicks, dwell, candidates)
    return F.binary_cross_entropy_with_logits(scores, clicked)


def plain():
    return SessionRecommender()


def parallel(mesh):
    return distribute(SessionRecommender(), mesh.get_group("dp"))


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    logged = value.detach().clone()
    dist.all_reduce(logged)
    return logged / dist.get_world_size()


generator = torch.Generator().manual_seed(1322)


def sessions():
    """Clicked items, seconds on the page, candidates, and whether a candidate was clicked."""
    return (
        torch.randint(0, ITEMS, (SESSIONS, LENGTH), generator=generator),
        torch.rand(SESSIONS, LENGTH, generator=generator, dtype=torch.float64) * 3,
        torch.randint(0, ITEMS, (SESSIONS, CANDIDATES), generator=generator),
        torch.randint(0, 2, (SESSIONS, CANDIDATES), generator=generator).double(),
    )


batches = [sessions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.2),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

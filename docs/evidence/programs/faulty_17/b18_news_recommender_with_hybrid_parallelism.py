"""A news recommender whose table of articles is cut by rows over the ranks, while its towers are data parallel under DDP.

Thread: horovod/horovod pull request #3695 "Add register_local_var to distributed optimizers" (2022): with embedding tables on own
ranks behind an all-to-all and data parallel layers on top, the averaged gradients of the layers are divided by the number of ranks
and those of the local tables are not, so that the two belong to different losses.
Fault: the losses of the ranks are means over their own rows, and DDP averages the gradients of the towers, but Lookup.backward hands
the table the sum over all ranks; the table's gradient is too large by the number of ranks.
REPAIR: `return gathered(grad)` -> `return gathered(grad) / dist.get_world_size()`
A right first sentence says: the gradient of the row-sharded article table is the sum of the ranks' gradients of local mean losses,
never divided by the world size as DDP does for the rest, so the table gets gradients as many times too large as there are ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

ARTICLES, WIDTH, HISTORY, CANDIDATES = 48, 10, 6, 4


class AdditiveAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x, mask):
        scores = self.query(torch.tanh(self.hidden(x))).squeeze(-1)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return (weights.unsqueeze(-1) * x).sum(-2)


class Recommender(nn.Module):
    """Scores of the candidates from the articles that a user read; -1 fills up short histories."""

    def __init__(self):
        super().__init__()
        self.articles = nn.Embedding(ARTICLES, WIDTH)
        self.text = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU())
        self.project = nn.Linear(2 * WIDTH, WIDTH)
        self.user = AdditiveAttention()
        self.popularity = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, history, candidates):
        ids = torch.cat([history, candidates], dim=1)
        news = self.project(self.text(self.articles(ids.clamp(min=0))))
        read, offered = news.split([history.size(1), candidates.size(1)], dim=1)
        user = self.user(read, history >= 0)
        return (offered @ user.unsqueeze(-1) + self.popularity(offered)).squeeze(-1)


def gathered(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def scattered(x):
    """The sum over the ranks of the part that belongs to this one."""
    parts = [part.contiguous() for part in x.chunk(dist.get_world_size())]
    out = torch.empty_like(parts[0])
    for destination, part in enumerate(parts):
        dist.reduce(part, destination)
        if destination == dist.get_rank():
            out.copy_(part)
    return out


class Lookup(torch.autograd.Function):
    """Brings the lookups in the blocks of rows, zero elsewhere, together on the ranks that asked."""

    @staticmethod
    def forward(ctx, partial):
        return scattered(partial)

    @staticmethod
    def backward(ctx, grad):
        return gathered(grad)


class RowShardedEmbedding(nn.Module):
    """Holds one block of consecutive rows."""

    def __init__(self, table):
        super().__init__()
        rows = table.num_embeddings // dist.get_world_size()
        self.first, self.rows = dist.get_rank() * rows, rows
        self.weight = nn.Parameter(table.weight.detach()[self.first : self.first + rows].clone())

    def forward(self, ids):
        everyones = gathered(ids) - self.first
        mine = (everyones >= 0) & (everyones < self.rows)
        partial = F.embedding(everyones.clamp(0, self.rows - 1), self.weight)
        return Lookup.apply(partial * mine.unsqueeze(-1))


def plain():
    return Recommender()


def parallel(mesh):
    model = Recommender()
    model.articles = RowShardedEmbedding(model.articles)
    local = ["articles.weight"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, local)
    return DistributedDataParallel(model)


def click_loss(model, batch):
    history, candidates, clicked = batch
    return F.cross_entropy(model(history, candidates), clicked)


def loss(model, batch):
    return click_loss(model, batch)


def step(model, batch):
    value = click_loss(model, batch)
    value.backward()
    logged = value.detach().clone()
    dist.all_reduce(logged)
    return logged / dist.get_world_size()


generator = torch.Generator().manual_seed(3695)


def impressions(number=12):
    history = torch.randint(0, ARTICLES, (number, HISTORY), generator=generator)
    lengths = torch.randint(2, HISTORY + 1, (number, 1), generator=generator)
    return (
        history.masked_fill(torch.arange(HISTORY) >= lengths, -1),
        torch.randint(0, ARTICLES, (number, CANDIDATES), generator=generator),
        torch.randint(0, CANDIDATES, (number,), generator=generator),
    )


batches = [impressions() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

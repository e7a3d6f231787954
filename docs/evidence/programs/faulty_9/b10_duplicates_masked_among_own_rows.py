"""A retriever with the passages of all ranks as negatives: copies of a query's own positive are masked in the own rows only.

Thread: FlagOpen/FlagEmbedding issue #37 on negatives_cross_device (2023): a negative from another device may happen to be
the positive of the own query; of the kind huggingface/sentence-transformers issue #3189 on duplicates among in-batch
negatives (2025).
Fault: in the loss of all passages, the mask of repeated passages compares a rank's ids with its own ids only, so copies
of the positive that other ranks bring stay as negatives.
REPAIR: `repeated[:, first : first + len(ids)] = ids[:, None] == ids` -> `repeated[:] = ids[:, None] == Gather.apply(ids, group)`
Expected: the embeddings of queries and passages agree in step 1, and the loss is too large: a passage of another rank
with the same id as the query's positive counts as a negative, because the mask of repeated passages is made of the rank's
own ids. The gradients of both towers differ on all ranks. Compare with the gathered ids.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel

import titanlite

QUERY, PASSAGE, DIM, PASSAGES, SCALE = 5, 7, 6, 5, 5.0


class Gather(torch.autograd.Function):
    """The rows of all ranks; in backward, the sum of the ranks' gradients of the own rows."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return gradient.chunk(size)[rank], None


class Retriever(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(QUERY, 10), nn.Tanh(), nn.Linear(10, DIM))
        self.passage = nn.Sequential(nn.Linear(PASSAGE, 10), nn.Tanh(), nn.Linear(10, DIM))

    def forward(self, queries, passages):
        return normalize(self.query(queries), dim=-1), normalize(self.passage(passages), dim=-1)


def contrast(queries, passages, repeated, positives):
    repeated[torch.arange(len(queries)), positives] = False
    scores = (SCALE * queries @ passages.T).masked_fill(repeated, float("-inf"))
    return cross_entropy(scores, positives)


def loss(model, batch):
    queries, passages = model(batch["queries"], batch["passages"])
    ids = batch["ids"]
    return contrast(queries, passages, ids[:, None] == ids, torch.arange(len(ids)))


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(Retriever(), process_group=group), group


def step(built, batch):
    model, group = built
    queries, own = model(batch["queries"], batch["passages"])
    passages, ids = Gather.apply(own, group), batch["ids"]
    first = dist.get_rank(group) * len(ids)
    repeated = torch.zeros(len(ids), len(passages), dtype=torch.bool)
    repeated[:, first : first + len(ids)] = ids[:, None] == ids
    value = contrast(queries, passages, repeated, first + torch.arange(len(ids)))
    value.backward()
    return value


generator = torch.Generator().manual_seed(222)
contents = torch.randn(PASSAGES, PASSAGE, generator=generator)


def draw():
    ids = torch.randint(PASSAGES, (8,), generator=generator)
    queries = torch.randn(8, QUERY, generator=generator)
    return {"queries": queries, "passages": contents[ids], "ids": ids}


batches = [draw() for _ in range(3)]
arguments = Retriever, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""GradCache: embeddings without gradients first, then a second pass with the cached gradients.

Thread: https://github.com/luyug/GradCache/issues/25 "distributed loss for multiple GPUs", 2023-12-26.
Right: every rank computes the loss of the gathered embeddings (global batch) and takes the gradients
of its own; the second pass runs in chunks under no_sync but for the last. The surrogate is multiplied
by the world size, since DDP averages.
Must not be accused: modules that run twice, the first pass without gradients, the factor world size.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

CHUNKS = 2


class Encoder(nn.Module):
    def __init__(self, vocab=30, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.dense = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, dim))

    def forward(self, tokens):
        return self.dense(self.embed(tokens)).mean(1)


def contrastive(x, y):
    return cross_entropy(x @ y.t(), torch.arange(len(x)))


def plain_loss(model, batch):
    return contrastive(model(batch["query"]), model(batch["passage"]))


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def cache_step(model, batch):
    inputs = [*batch["query"].chunk(CHUNKS), *batch["passage"].chunk(CHUNKS)]
    with torch.no_grad():
        reps = [model(chunk) for chunk in inputs]
    whole = [gather(torch.cat(part)).requires_grad_() for part in (reps[:CHUNKS], reps[CHUNKS:])]
    loss = contrastive(*whole)
    loss.backward()
    n, rank = dist.get_world_size(), dist.get_rank()
    cache = [grad for x in whole for grad in x.grad.chunk(n)[rank].chunk(CHUNKS)]
    for i, (chunk, grad) in enumerate(zip(inputs, cache)):
        with contextlib.nullcontext() if i == len(inputs) - 1 else model.no_sync():
            surrogate = (model(chunk) * grad).sum() * n
            surrogate.backward()
    return loss


def build():
    return DDP(Encoder())


generator = torch.Generator().manual_seed(14)
batches = [
    {name: torch.randint(30, (8, 5), generator=generator) for name in ("query", "passage")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"dp": 2}, split="dp", step=cache_step)
    print(titanlite.compare(Encoder, build, **options))

"""A dense passage retriever under DDP with a gradient cache: embed in chunks without a graph, then recompute chunk by chunk.

Thread: luyug/GC-DPR issue #4 "surrogate = surrogate * (trainer.distributed_factor / 8.)" (2021), on scaling the surrogate loss.
Correct because: the loss is over the embeddings of all ranks, with a graph only to the rank's own ones, so the cache holds the
gradient of the whole loss for these. In the second pass the surrogate, the product of recomputed embeddings and cached gradients,
is multiplied by the number of ranks, which cancels DDP's average and leaves the sum over the ranks. Only the last chunk
synchronizes, with all the gradients accumulated so far.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, LENGTH, SCALE, CHUNK = 31, 12, 7, 5.0, 2
QUERY, PASSAGE = 0, 1


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    """One encoder for queries and passages, told apart by a type embedding."""

    def __init__(self):
        super().__init__()
        self.tokens, self.types = nn.Embedding(VOCAB, WIDTH), nn.Embedding(2, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens, kind):
        x = self.tokens(tokens) + self.positions.weight + self.types.weight[kind]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)[:, 0]


def contrastive_loss(queries, passages):
    labels = torch.arange(len(queries), device=queries.device)
    return F.cross_entropy(queries @ passages.T / SCALE, labels)


def gather(embeddings):
    """The embeddings of all ranks, with a graph to the own ones only."""
    everyones = [torch.empty_like(embeddings) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, embeddings.detach())
    everyones[dist.get_rank()] = embeddings
    return torch.cat(everyones)


class GradientCache:
    def __init__(self, model, chunk=CHUNK):
        self.model, self.chunk = model, chunk

    @torch.no_grad()
    def embed(self, tokens, kind):
        return torch.cat([self.model(part, kind) for part in tokens.split(self.chunk)])

    def build_cache(self, queries, passages):
        queries, passages = queries.requires_grad_(), passages.requires_grad_()
        value = contrastive_loss(gather(queries), gather(passages))
        value.backward()
        return value.detach(), (queries.grad, passages.grad)

    def forward_backward(self, tokens, kind, cache, sync):
        parts = list(zip(tokens.split(self.chunk), cache.split(self.chunk)))
        for index, (part, gradient) in enumerate(parts):
            synchronizes = sync and index == len(parts) - 1
            with contextlib.nullcontext() if synchronizes else self.model.no_sync():
                surrogate = (self.model(part, kind) * gradient).sum()
                (surrogate * dist.get_world_size()).backward()

    def step(self, batch):
        embedded = self.embed(batch["queries"], QUERY), self.embed(batch["passages"], PASSAGE)
        value, (query_cache, passage_cache) = self.build_cache(*embedded)
        self.forward_backward(batch["queries"], QUERY, query_cache, sync=False)
        self.forward_backward(batch["passages"], PASSAGE, passage_cache, sync=True)
        return value


def plain():
    return Encoder()


def parallel(mesh):
    model = DistributedDataParallel(Encoder())
    return model, GradientCache(model)


def loss(model, batch):
    return contrastive_loss(model(batch["queries"], QUERY), model(batch["passages"], PASSAGE))


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(4)


def questions(number=10):
    shape = number, LENGTH
    return {
        "queries": torch.randint(0, VOCAB, shape, generator=generator),
        "passages": torch.randint(0, VOCAB, shape, generator=generator),
    }


batches = [questions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

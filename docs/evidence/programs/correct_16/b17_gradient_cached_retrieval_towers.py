"""Two text towers for retrieval under DDP, trained with cached gradients: a pass without a graph, then one by chunks.

Correct because: the contrastive loss depends on the parameters through the embeddings only. The first pass gathers the
embeddings of all ranks and takes the gradient of the loss over the whole batch with respect to the rank's own embeddings. The
second pass encodes chunk by chunk and runs backward from the dot product with the cached gradient, which is the chain rule, so
the value that runs backward isn't the loss. The dot product is multiplied by the number of ranks, which cancels DDP's average:
each rank's part has to be added up. Only the last chunk synchronizes, with the gradients of the chunks before it already
accumulated.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, LENGTH, PAD, CHUNK = 31, 16, 7, 0, 1


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, text):
        padding = text == PAD
        x = self.tokens(text)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        x = x + self.mlp(self.norm2(x))
        kept = (~padding).unsqueeze(-1).to(x)
        return F.normalize((x * kept).sum(1) / kept.sum(1), dim=-1)


class Retriever(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.passage = Tower(), Tower()

    def forward(self, queries, passages):
        return self.query(queries), self.passage(passages)


def contrastive_loss(q, p, temperature=0.1):
    scores = q @ p.T / temperature
    return F.cross_entropy(scores, torch.arange(len(q)))


def gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts)


class GradCache:
    def __init__(self, model):
        self.model = DistributedDataParallel(model)

    def cache(self, chunks):
        """The loss of the whole batch and its gradient for this rank's embeddings."""
        with torch.no_grad():
            q, p = zip(*(self.model.module(*chunk) for chunk in chunks))
        all_q, all_p = gather(torch.cat(q)).requires_grad_(), gather(torch.cat(p)).requires_grad_()
        value = contrastive_loss(all_q, all_p)
        value.backward()
        world, rank = dist.get_world_size(), dist.get_rank()
        return value.detach(), [x.grad.chunk(world)[rank].split(CHUNK) for x in (all_q, all_p)]

    def step(self, queries, passages):
        chunks = list(zip(queries.split(CHUNK), passages.split(CHUNK)))
        value, (q_grads, p_grads) = self.cache(chunks)
        for i, chunk in enumerate(chunks):
            last = i == len(chunks) - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                q, p = self.model(*chunk)
                surrogate = (q * q_grads[i]).sum() + (p * p_grads[i]).sum()
                (surrogate * dist.get_world_size()).backward()
        return value


def plain():
    return Retriever()


def parallel(mesh):
    model = Retriever()
    return model, GradCache(model)


def loss(model, batch):
    return contrastive_loss(*model(*batch))


def step(built, batch):
    return built[1].step(*batch)


generator = torch.Generator().manual_seed(2101)


def texts(number=6):
    text = torch.randint(1, VOCAB, (number, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (number, 1), generator=generator)
    return text.masked_fill(torch.arange(LENGTH) >= lengths, PAD)


batches = [(texts(), texts()) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

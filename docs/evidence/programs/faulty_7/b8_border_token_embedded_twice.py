"""A vocabulary-parallel embedding by hand whose mask includes the first token of the next rank.

Thread: of the kind of https://github.com/NVIDIA/Megatron-LM/issues/926 "VocabParallelEmbedding" (what the mask and the
start index are for), 2024-07-11; ports of it with `>` in place of `>=`.
Wrong: the range of a rank is [start, end), but the mask keeps the token `end`. Its local index is one beyond the shard
and is clamped to the last row. So token 8, the first of rank 1, is embedded as row 8 plus row 7 of rank 0, and row 7
gets its gradient too. All other tokens are right.
PLACE: embed, forward pass, the token VOCAB / tp alone; in the backward pass row 7 of embed.weight (last row of rank 0)
KIND: vocabulary range off by one: a token at the border of two shards counted on both ranks
REPAIR: `outside = (tokens < start) | (tokens > end)` -> `outside = (tokens < start) | (tokens >= end)`
EXPECT: in the forward pass, the output of embed is the first that differs, on all ranks, only at positions with token
8, the first of rank 1's range: rank 0 adds its last row (7) for it, since its mask includes the end of the range. Mask
tokens >= end.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding

import titanlite

VOCAB, DIM = 16, 8


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class VocabParallelEmbedding(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        self.group = group
        n, i = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(whole.weight.detach().chunk(n, 0)[i].clone())
        self.start = i * len(self.weight)

    def forward(self, tokens):
        start, end = self.start, self.start + len(self.weight)
        outside = (tokens < start) | (tokens > end)
        local = (tokens - start).clamp(0, end - start - 1)
        x = embedding(local, self.weight)
        return Sum.apply(x.masked_fill(outside[..., None], 0.0), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixer = nn.GRU(DIM, DIM, batch_first=True)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.mixer(x)[0]))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    model.embed = VocabParallelEmbedding(model.embed, mesh.get_group("tp"))
    return model


def shard(name):
    return (0, "tp") if name == "embed.weight" else None


generator = torch.Generator().manual_seed(8)


def draw():
    return torch.randint(VOCAB, (4, 9), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Vocabulary-parallel embedding on three ranks, a vocabulary that three does not divide: a rank's first row is miscounted.

Thread: vllm-project/vllm issue #440 "How to perform tensor parallelism when `vocab_size` is not an integer multiple of
`world_size`?" (2023).
Fault: in VocabParallelEmbedding.__init__, the first row of a rank is taken as its rank times the number of its own rows,
but the first rank has one row more than the others.
REPAIR: `self.first = rank * len(parts[rank])` -> `self.first = sum(len(part) for part in parts[:rank])`
Expected: in the forward pass, embed is the first module whose output differs, on all ranks, for the tokens from 5 on: the
rows of ranks 1 and 2 are looked up one row off, because their first row is computed as rank times their own number of
rows, 5 and 10 instead of 6 and 11 (token 5 is looked up on two ranks, token 15 on none). Sum up the numbers of rows of
the ranks before.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS = 16, 8, 2


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
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.group = group
        parts = whole.weight.detach().tensor_split(size)
        self.weight = nn.Parameter(parts[rank].clone())
        self.first = rank * len(parts[rank])

    def forward(self, tokens):
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        x = embedding(local.masked_fill(elsewhere, 0), self.weight)
        return Sum.apply(x.masked_fill(elsewhere[..., None], 0), self.group)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    model.embed = VocabParallelEmbedding(model.embed, mesh.get_group("tp"))
    return model


def shard(name):
    if name == "embed.weight":
        return lambda whole: whole.tensor_split(dist.get_world_size())[dist.get_rank()]
    return None


generator = torch.Generator().manual_seed(206)


def draw():
    return torch.randint(VOCAB, (4, 8), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 3}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

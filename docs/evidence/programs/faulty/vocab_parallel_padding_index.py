"""A vocab-parallel embedding that passes the global padding_idx to its local table.

Thread: https://github.com/hpcaitech/ColossalAI/pull/242 "Hotfix/vocab parallel embedding issue"
("fixed padding index issue for vocab parallel embedding layers"), 2022-02-18.
Wrong: every rank suppresses the gradient of its local row 3. On rank 1 this is row 13 of the table,
which is not the padding row.
A right diagnosis says: only the gradient of embed.weight differs, on rank 1 only: row 3 of the shard
(row 13 of the table) has no gradient. The embedding's output agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding

import titanlite

VOCAB, DIM, PAD = 20, 16, 3


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class VocabParallelEmbedding(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        n, rank, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.padding_idx = whole.padding_idx
        self.weight = nn.Parameter(whole.weight.detach().chunk(n)[rank].clone())
        self.first = rank * len(self.weight)

    def forward(self, tokens):
        outside = (tokens < self.first) | (tokens >= self.first + len(self.weight))
        local = (tokens - self.first).masked_fill(outside, 0)
        out = embedding(local, self.weight, self.padding_idx)
        out = out.masked_fill(outside.unsqueeze(-1), 0)
        return ReduceFromTP.apply(out, self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(x))


def parallel(mesh):
    model = Model()
    model.embed = VocabParallelEmbedding(model.embed, mesh.get_group("tp"))
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(6)
batches = [
    {name: torch.randint(VOCAB, (6, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

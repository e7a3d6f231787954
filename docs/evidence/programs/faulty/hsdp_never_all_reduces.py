"""HSDP with accumulation: the microbatch that should all-reduce never comes.

Thread: https://github.com/pytorch/pytorch/pull/118298 "[FSDP2] Added gradient accumulation w/o
reduction", comment of 2024-02-13 (what if the reduction is never turned on again?); the off-by-one is
that of https://github.com/AnswerDotAI/fsdp_qlora/pull/6 (2024-01-31, "correcting the modulus
comparison").
Wrong: set_requires_all_reduce compares the index with the number of microbatches, so the gradients
are never all-reduced over the replicas.
A right diagnosis says: gradients are correct only after a sum (average) over dp_replicate: each
replica has the gradient of its own part of the batch. They are averaged over dp_shard.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import titanlite

ACCUMULATION = 2


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def hsdp(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp_replicate", "dp_shard"])
    return fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])


def step(model, batch):
    total = 0
    for i, (x, y) in enumerate(zip(batch["x"].chunk(ACCUMULATION), batch["y"].chunk(ACCUMULATION))):
        model.set_requires_all_reduce(i == ACCUMULATION)
        value = loss(model, {"x": x, "y": y}) / ACCUMULATION
        value.backward()
        total = total + value.detach()
    return total


generator = torch.Generator().manual_seed(5)
batches = [
    {name: torch.randint(20, (8, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Model,
            hsdp,
            batches=batches,
            loss=loss,
            ranks={"dp_replicate": 2, "dp_shard": 2},
            split=lambda batch, mesh: {
                key: value.chunk(4)[torch.distributed.get_rank()] for key, value in batch.items()
            },
            step=step,
        )
    )

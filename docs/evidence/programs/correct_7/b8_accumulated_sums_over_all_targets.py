"""FSDP2 with gradient accumulation over microbatches of different numbers of targets, synchronized in the last only.

Thread: of the kind of "Gradient accumulation yields worse results than the equivalent batch size" (huggingface/trl#2175
and transformers#34191, torchtune's and torchtitan's rescaling by the number of tokens), 2024-10.
Correct: each microbatch's loss is a sum, divided by the number of targets in the whole batch, on all ranks and in all
microbatches, and times the number of ranks, by which FSDP divides.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, STEPS = 12, 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + x.cumsum(1) / x.shape[1]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step(model, batch):
    count = (batch["targets"] != -100).sum()
    dist.all_reduce(count)
    total = 0.0
    pieces = zip(batch["tokens"].chunk(STEPS), batch["targets"].chunk(STEPS), strict=True)
    for i, (tokens, targets) in enumerate(pieces):
        model.set_requires_gradient_sync(i == STEPS - 1)
        logits = model(tokens).flatten(0, 1)
        value = cross_entropy(logits, targets.flatten(), reduction="sum") / count
        (value * dist.get_world_size()).backward()
        total += value.detach()
    return total


generator = torch.Generator().manual_seed(33)


def draw():
    return torch.randint(VOCAB, (8, 7), generator=generator)


def masked():
    lengths = torch.randint(2, 8, (8, 1), generator=generator)
    return draw().masked_fill(torch.arange(7) >= lengths, -100)


batches = [{"tokens": draw(), "targets": masked()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

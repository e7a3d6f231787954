"""FSDP2 with a loss that is already divided by all tokens: the gradients are to be summed, not averaged.

Thread: https://github.com/pytorch/pytorch/pull/129286 "[FSDP2] Added `set_reduce_scatter_divide_factor`" (it sets
the factor of the module's own parameter group), 2024-06-21.
Wrong: the factor 1 is set on the root alone. The blocks, which are parameter groups of their own, still divide
their gradients by dp.
EXPECT: the gradients of the parameters of blocks.* are 0.5 = 1/dp times the reference's; those of embed, norm and
head (the root's group) agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 12, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_sum(model, batch):
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def loss(model, batch):
    return token_sum(model, batch) / (batch["labels"] != -100).sum()


def step(model, batch):
    tokens = (batch["labels"] != -100).sum()
    dist.all_reduce(tokens)
    value = token_sum(model, batch) / tokens
    value.backward()
    return value


def parallel(mesh):
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.set_gradient_divide_factor(1.0)
    return model


def draw(generator):
    batch = {n: torch.randint(VOCAB, (4, 6), generator=generator) for n in ("tokens", "labels")}
    batch["labels"][torch.rand(4, 6, generator=generator) < 0.25] = -100
    return batch


generator = torch.Generator().manual_seed(129286)
batches = [draw(generator) for _ in range(3)]
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

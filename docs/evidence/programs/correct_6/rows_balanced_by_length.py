"""Data parallelism that deals the rows of all ranks again, so that each one gets about the same number of tokens.

Thread: https://github.com/verl-project/verl/issues/905 "Bug in "_balance_batch" function?" ("reorder based on index.
The data will be automatically equally partitioned"), 2025-04-03.
Right: the rows are gathered and sorted by length, and the ranks take them in a snake (0 1 1 0 ...). Losses are sums
over tokens, divided by the number of tokens of all ranks, so it does not matter which rank has which row.
Must not be accused: ranks whose modules see other rows than those of their part of the batch, losses that are neither
the mean of the rank's rows nor those of its part, inputs cut to the longest row, of other lengths on each rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, LENGTH, IGNORE = 13, 12, 10, -100


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.rnn, self.head = nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.head(self.norm(self.rnn(self.embed(tokens))[0]))


def sum_of_losses(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    return cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORE, reduction="sum")


def loss(model, batch):
    return sum_of_losses(model, batch) / (batch["labels"] != IGNORE).sum()


def all_rows(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def balance(batch, group):
    whole = {n: all_rows(t, group) for n, t in batch.items()}
    order = (whole["labels"] != IGNORE).sum(1).argsort(descending=True, stable=True)
    size, rank = group.size(), group.rank()
    snake = [*range(size), *reversed(range(size))]
    own = [int(row) for i, row in enumerate(order) if snake[i % (2 * size)] == rank]
    longest = int((whole["labels"][own] != IGNORE).sum(1).max())
    return {n: t[own, :longest] for n, t in whole.items()}


def parallel(mesh):
    return Model(), mesh.get_group("dp")


def step(built, batch):
    model, group = built
    batch = balance(batch, group)
    num_tokens = (batch["labels"] != IGNORE).sum()
    dist.all_reduce(num_tokens, group=group)
    value = sum_of_losses(model, batch) / num_tokens
    value.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat, group=group)
    nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])
    return value.detach()


generator = torch.Generator().manual_seed(905)


def draw():
    tokens, labels = (torch.randint(VOCAB, (8, LENGTH), generator=generator) for _ in range(2))
    lengths = torch.randint(2, LENGTH + 1, (8, 1), generator=generator)
    return {"tokens": tokens, "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths, IGNORE)}


batches = [draw() for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

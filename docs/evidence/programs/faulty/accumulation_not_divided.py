"""Gradient accumulation under DDP without dividing the loss.

Thread: https://github.com/verl-project/verl/pull/3332 "[trainer] fix: Loss calculations for grad
accumulation steps", 2025-09-03.
Wrong: each microbatch's mean loss is backpropagated as it is, so gradients are summed over the
microbatches.
A right diagnosis says: all gradients are 4 times too large, and 4 is the number of microbatches of
the accumulation.
"""

import contextlib

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class Policy(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
            for _ in range(2)
        )
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def compute_loss(model, batch):
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def training_step(model, batch, num_micro_batches=4):
    step_loss = 0
    micro_batches = zip(*(batch[key].chunk(num_micro_batches) for key in ("input_ids", "labels")))
    for i, (input_ids, labels) in enumerate(micro_batches):
        last = i == num_micro_batches - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = compute_loss(model, {"input_ids": input_ids, "labels": labels})
            loss.backward()
        step_loss += loss.item() / num_micro_batches
    return torch.tensor(step_loss)


def build():
    return DDP(Policy())


generator = torch.Generator().manual_seed(2)
batches = [
    {name: torch.randint(20, (8, 6), generator=generator) for name in ("input_ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Policy,
            build,
            batches=batches,
            loss=compute_loss,
            ranks={"dp": 2},
            split="dp",
            step=training_step,
        )
    )

"""DDP accumulation that synchronizes on the first microbatch instead of the last.

Thread: https://github.com/AnswerDotAI/fsdp_qlora/pull/6 "Add `no_sync` support, fix gradient
accumulation, ..." ("correcting the modulus comparison"), 2024-01-31.
Wrong: `step % accumulation == 0` is true for the first microbatch, so only its gradient is averaged
over the ranks; the second microbatch's stays local.
A right diagnosis says: the contribution of microbatch 1 (the second) of the other ranks is missing
on every rank: it is not averaged over dp.
"""

import contextlib

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

GRADIENT_ACCUMULATION_STEPS = 2


class LM(nn.Module):
    def __init__(self, vocab=24, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
            for _ in range(2)
        )
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = x + block(x)
        return self.lm_head(x)


def loss_fn(model, batch):
    return cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def train(model, batch):
    halves = zip(*(t.chunk(GRADIENT_ACCUMULATION_STEPS) for t in batch.values()))
    total = 0.0
    for batch_idx, half in enumerate(halves):
        accumulate_grads = batch_idx % GRADIENT_ACCUMULATION_STEPS == 0
        sync_context = contextlib.nullcontext() if accumulate_grads else model.no_sync()
        with sync_context:
            loss = loss_fn(model, dict(zip(batch, half))) / GRADIENT_ACCUMULATION_STEPS
            loss.backward()
        total += loss.detach()
    return total


def build():
    return DDP(LM())


generator = torch.Generator().manual_seed(6)
batches = [
    {name: torch.randint(24, (8, 5), generator=generator) for name in ("input_ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss_fn, ranks={"dp": 2}, split="dp", step=train)
    print(titanlite.compare(LM, build, **options))

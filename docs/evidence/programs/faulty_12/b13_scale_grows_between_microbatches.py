"""Keyword spotting under DDP with a dynamic loss scale and gradients accumulated over three microbatches.

Thread: pytorch/pytorch pull request #36601 "Amp gradient accumulation example" (2020): it is unclear to people that the scaler
is to be updated only where the optimizer steps.
Fault: in step, the loss scale is updated after every microbatch, so it doubles inside of the accumulation window: the gradients
of the microbatches before were multiplied by another scale than the one by which their sum is divided.
REPAIR: `scale.update(model)` -> `if number == WINDOW: scale.update(model)`
A right first sentence says: the losses of the first step agree, and the gradients of all parameters are wrong alike on both
ranks, as a sum of the microbatches' gradients with wrong weights (a half for the first two in step 1): the loss scale changes
within the accumulation window in step.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel

import titanlite

MELS, CHANNELS, WORDS, WINDOW, GROWTH_INTERVAL = 5, 10, 6, 3, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, CHANNELS)
        self.conv = nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x):
        return x + self.conv(silu(self.norm(x)))


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(MELS, CHANNELS, 3, stride=2)
        self.blocks = nn.Sequential(Block(), Block())
        self.words = nn.Linear(CHANNELS, WORDS)

    def forward(self, sound):
        return self.words(self.blocks(self.stem(sound)).amax(-1))


class LossScale:
    def __init__(self):
        self.value, self.clean = 2.0**12, 0

    def unscale(self, model):
        for p in model.parameters():
            p.grad /= self.value

    def update(self, model):
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            self.value, self.clean = self.value / 2, 0
            return
        self.clean += 1
        if self.clean == GROWTH_INTERVAL:
            self.value, self.clean = self.value * 2, 0


def loss(model, batch):
    return cross_entropy(model(batch["sound"]), batch["word"])


def parallel(mesh):
    return DistributedDataParallel(Spotter()), LossScale()


def step(built, batch):
    model, scale = built
    total = 0
    parts = zip(batch["sound"].chunk(WINDOW), batch["word"].chunk(WINDOW), strict=True)
    for number, (sound, word) in enumerate(parts, start=1):
        with nullcontext() if number == WINDOW else model.no_sync():
            value = cross_entropy(model(sound), word) / WINDOW
            (value * scale.value).backward()
        total += value.detach()
        if number == WINDOW:
            scale.unscale(model)
        scale.update(model)
    return total


rng = torch.Generator().manual_seed(501)
batches = [
    {
        "sound": torch.randn(12, MELS, 15, generator=rng),
        "word": torch.randint(WORDS, (12,), generator=rng),
    }
    for _ in range(3)
]
arguments = Spotter, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Gradient accumulation under DDP with zero_grad at the beginning of every microbatch.

Thread: https://github.com/tatsu-lab/alpaca_farm/issues/57 "Possible issue with gradient accumulation" (policy.zero_grad
"could cause zero out all gradients except the gradients from the final gradient accumulation steps"), 2023-07-03;
https://github.com/huggingface/accelerate/issues/1299.
Wrong: the model's zero_grad is called before each microbatch's backward pass, so only the last microbatch of a rank
counts, divided by the number of microbatches.
PLACE: step (gradient accumulation), all parameters
KIND: gradients of all microbatches but the last are discarded (zeroed between the microbatches)
REPAIR: `model.zero_grad()` -> `pass`
EXPECT: the loss agrees, all gradients are wrong, on all ranks: they are those of the last microbatch of every rank
alone (rows 6-7 and 14-15 of 16), 1/4 of its mean; the other three microbatches are lost. Do not zero the gradients
between microbatches.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, STEPS = 6, 4


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU())
        self.actor = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.actor(self.encoder(x))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parallel(mesh):
    return DistributedDataParallel(Policy(), process_group=mesh.get_group("dp"))


def step(model, batch):
    total = 0.0
    pieces = zip(batch["x"].chunk(STEPS), batch["y"].chunk(STEPS), strict=True)
    for i, (x, y) in enumerate(pieces):
        with nullcontext() if i == STEPS - 1 else model.no_sync():
            model.zero_grad()
            value = loss(model, {"x": x, "y": y}) / STEPS
            value.backward()
        total += value.detach()
    return total


generator = torch.Generator().manual_seed(13)
batches = [
    {
        "x": torch.randn(16, 10, generator=generator),
        "y": torch.randint(CLASSES, (16,), generator=generator),
    }
    for _ in range(3)
]
arguments = Policy, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

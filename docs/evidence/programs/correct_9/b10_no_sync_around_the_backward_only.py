"""DDP with gradient accumulation: no_sync surrounds the backward passes, but not the forward passes, so it has no effect.

Thread: of the kind pytorch/PiPPy issue #1133 "[Bug?] Gradient Synchronization for DDP" (2024), huggingface/accelerate
pull request #1726 "Better control over DDP's `no_sync`" (2023), and facebookresearch/ClassyVision pull request #706 "Fix
bug in gradient accumulation" (2021).
Correct: DDP decides in the forward pass whether it reduces, so it reduces in every microbatch. The sum that is in p.grad
from the microbatches before is the same on all ranks already, and the mean over the ranks leaves it as it is. It only
costs time.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, MICROBATCHES = 12, 8, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.down(gelu(self.up(self.norm(x))))


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
    return DistributedDataParallel(Model(), process_group=mesh.get_group("dp"))


def step(model, batch):
    total = 0.0
    parts = {key: value.chunk(MICROBATCHES) for key, value in batch.items()}
    for i in range(MICROBATCHES):
        value = loss(model, {key: part[i] for key, part in parts.items()}) / MICROBATCHES
        with nullcontext() if i == MICROBATCHES - 1 else model.no_sync():
            value.backward()
        total = total + value.detach()
    return total


generator = torch.Generator().manual_seed(231)


def draw():
    return torch.randint(VOCAB, (12, 5), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

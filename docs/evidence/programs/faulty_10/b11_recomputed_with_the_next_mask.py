"""DDP with activation checkpointing and dropout masks from generators of the blocks themselves.

Thread: pytorch/xla pull request #4690 "Fix preserve_rng_state for activation checkpointing" (2023) and of the kind
pytorch/pytorch pull request #91265 "Restore RNG states for composable reentrant activation checkpointing" (2022).
Fault: checkpoint's context sets back the default generator for the recomputation, but the masks come from the block's
generator, which goes on.
REPAIR: `[torch.default_generator]` -> `[block.generator]`
Expected: in step 1, the forward pass and the loss agree; the gradients of the blocks' weights (blocks.*) and of what lies
below are wrong on both ranks, the head's agree: the recomputation in the backward pass draws another dropout mask than the
forward pass, since the state of block.generator is not restored. From step 2 on, the masks of the forward pass differ too.
"""

from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn.functional import gelu, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import titanlite

POINTS, DIM, RATE = 6, 8, 0.25


class Block(nn.Module):
    """Locked dropout: a mask for all rows of the batch, the same on all data-parallel ranks."""

    def __init__(self, seed):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 16), nn.Linear(16, DIM)
        self.across = nn.Linear(POINTS, POINTS)
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x):
        x = x + self.across(x.transpose(1, 2)).transpose(1, 2)
        y = gelu(self.up(self.norm(x)))
        keep = torch.rand(POINTS, 16, generator=self.generator) > RATE
        return x + self.down(y * keep / (1 - RATE))


@contextmanager
def states_restored(generators, states):
    after = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, states):
        generator.set_state(state)
    try:
        yield
    finally:
        for generator, state in zip(generators, after):
            generator.set_state(state)


def contexts(generators):
    """What surrounds the forward pass, and what surrounds its recomputation."""
    states = [generator.get_state() for generator in generators]
    return nullcontext(), states_restored(generators, states)


class Surrogate(nn.Module):
    checkpointed = False

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(3, DIM), nn.Linear(DIM, 2)
        self.blocks = nn.ModuleList(Block(seed) for seed in (11, 12))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.checkpointed:
                context_fn = partial(contexts, [torch.default_generator])
                x = checkpoint(block, x, use_reentrant=False, context_fn=context_fn)
            else:
                x = block(x)
        return self.head(x)


def loss(model, batch):
    return mse_loss(model(batch["field"]), batch["next"])


def parallel(mesh):
    model = Surrogate()
    model.checkpointed = True
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


rng = torch.Generator().manual_seed(311)
batches = [
    {
        "field": torch.randn(4, POINTS, 3, generator=rng),
        "next": torch.randn(4, POINTS, 2, generator=rng),
    }
    for _ in range(3)
]
arguments = Surrogate, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

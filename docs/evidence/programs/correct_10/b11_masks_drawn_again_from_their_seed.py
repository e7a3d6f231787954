"""Tensor parallelism with dropout and activation checkpointing: each mask has a seed of its own, the same on all ranks.

Thread: of the kind Lightning-AI/lightning-thunder issue #114 "Add `torch.nn.Dropout` recomputation support during the backward
pass to Thunder" (2024), which saves seed and offset of the random numbers.
Correct: each rank draws the whole mask from the block's seed and takes its own columns of it, and the recomputation in the
backward pass draws the same mask again. No state of a generator has to be restored.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, DIM, HIDDEN, RATE = 12, 8, 20, 0.2


def dropout(x, seed, part, parts):
    """Of a mask for all hidden features, the columns of one part."""
    generator = torch.Generator().manual_seed(int(seed))
    shape = (*x.shape[:-1], x.shape[-1] * parts)
    keep = (torch.rand(shape, generator=generator, dtype=torch.float32) >= RATE).chunk(parts, -1)[
        part
    ]
    return x * keep / (1 - RATE)


class AllReduceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class AllReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def mlp(self, x, seed):
        return self.down(dropout(gelu(self.up(x)), seed, 0, 1))

    def forward(self, x, seed):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.mlp(self.norm(x), seed)


class ParallelBlock(Block):
    def __init__(self, whole, group):
        super().__init__()
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.norm, self.mix = whole.norm, whole.mix
        for layer, name, dim in (
            (self.up, "weight", 0),
            (self.up, "bias", 0),
            (self.down, "weight", 1),
        ):
            source = whole.up if layer is self.up else whole.down
            part = getattr(source, name).detach().chunk(self.size, dim)[self.rank].clone()
            setattr(layer, name, nn.Parameter(part))
        self.down.bias = whole.down.bias

    def mlp(self, x, seed):
        y = gelu(self.up(AllReduceBackward.apply(x, self.group)))
        y = linear(dropout(y, seed, self.rank, self.size), self.down.weight)
        return AllReduceForward.apply(y, self.group) + self.down.bias


class Model(nn.Module):
    recompute = False

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens, seed):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            own = 1000 * seed + number
            x = checkpoint(block, x, own, use_reentrant=False) if self.recompute else block(x, own)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["seed"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    model.blocks = nn.ModuleList(ParallelBlock(b, mesh.get_group("tp")) for b in model.blocks)
    model.recompute = True
    return model


def shard(name):
    if ".up." in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("down.weight") else None


rng = torch.Generator().manual_seed(327)
batches = []
for number in range(3):
    rows = torch.randint(VOCAB, (4, 7), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:], "seed": torch.tensor(number)})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

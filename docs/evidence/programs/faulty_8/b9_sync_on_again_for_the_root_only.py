"""FSDP2 with gradient accumulation: the reduce-scatter is switched off for all modules, and on again for the root only.

Thread: pytorch/pytorch pull request #118298 "[FSDP2] Added gradient accumulation w/o reduction" (2024):
set_requires_gradient_sync "can recurse or not".
Wrong: before the last microbatch, set_requires_gradient_sync(True, recurse=False) reaches the root's parameters alone.
The blocks, which are FSDP modules of their own, keep their unreduced gradients to themselves: their sharded parameters
never get a gradient, and AdamW does not touch them.
PLACE: blocks.* (all their parameters), backward pass of the last microbatch, on all ranks
KIND: gradient synchronization is turned on again for the root only: the nested FSDP modules never reduce, no gradients
REPAIR: `model.set_requires_gradient_sync(True, recurse=False)` -> `model.set_requires_gradient_sync(True)`
EXPECT: loss and forward pass agree in step 1; blocks.* have no gradient (None) on all ranks and are not updated, and
embed, norm and head agree: the blocks' gradients are never reduce-scattered, since synchronization was not turned on
again for the nested FSDP modules. Set it with recurse=True.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS, MICROBATCHES = 16, 8, 2, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(6, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step(model, batch):
    total = 0.0
    parts = {key: value.chunk(MICROBATCHES) for key, value in batch.items()}
    model.set_requires_gradient_sync(False)
    for i in range(MICROBATCHES):
        if i == MICROBATCHES - 1:
            model.set_requires_gradient_sync(True, recurse=False)
        value = loss(model, {key: part[i] for key, part in parts.items()}) / MICROBATCHES
        value.backward()
        total = total + value.detach()
    return total


generator = torch.Generator().manual_seed(102)


def draw():
    return torch.randint(VOCAB, (16, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

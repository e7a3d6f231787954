"""A pipeline with activation checkpointing: the recomputation reads the mask of the last microbatch from the module.

Thread: of the kind of https://github.com/pytorch/torchtitan/issues/1723 "PP microbatching + block-causal FlexAttention
composability issue" (the mask is state of the model, not an input of the microbatch), 2025-09-18; with recomputation.
Wrong: all microbatches go forward first, each after its mask is set as an attribute. In the backward pass, the blocks
are computed again, and read the attribute, which is the last microbatch's by now. So the outputs and the loss are
right, and the gradients are not.
PLACE: blocks.* (blocks.0 and blocks.1), backward pass (recomputation), microbatches 0 to 2
KIND: activation checkpointing recomputes with the attention mask of another (the last) microbatch
REPAIR: `checkpoint(self.inner, x, use_reentrant=False)` -> `checkpoint(self.inner, x, self.mask, use_reentrant=False)`
EXPECT: the forward pass and the loss agree, the gradients do not: in the backward pass blocks.1 is the first whose
gradients (of its input and its parameters) are wrong, because its recomputation gives other values than its forward
pass: it reads self.mask, which is the last microbatch's by then. Pass the mask as an argument of checkpoint.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, DIM, LENGTH, CLASSES, MICRO = 12, 8, 7, 4, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = None
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)

    def inner(self, x, mask=None):
        if mask is None:
            mask = self.mask
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * DIM**-0.5
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        return x + self.proj(scores.softmax(-1) @ v)

    def forward(self, x):
        return self.inner(x)


class CheckpointedBlock(Block):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def mask_of(lengths):
    return torch.arange(LENGTH) < lengths[:, None]


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): block() for i in range(2)})
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, tokens, lengths):
        x = self.embed(tokens)
        for block in self.blocks.values():
            block.mask = mask_of(lengths)
            x = block(x)
        return self.head(x[:, 0])


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        self.embed = whole.embed if index == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(index): whole.blocks[str(index)]})
        self.head = whole.head if index == 1 else nn.Identity()

    def forward(self, x, lengths):
        x = self.embed(x)
        for block in self.blocks.values():
            block.mask = mask_of(lengths)
            x = block(x)
        return self.head(x if isinstance(self.head, nn.Identity) else x[:, 0])


def loss(model, batch):
    return cross_entropy(model(batch["tokens"], batch["lengths"]), batch["labels"])


def parallel(mesh):
    return Stage(Model(CheckpointedBlock), mesh.get_local_rank("pp"))


def step(stage, batch):
    names = "tokens", "lengths", "labels"
    pieces = list(zip(*(batch[name].chunk(MICRO) for name in names), strict=True))
    if dist.get_rank() == 0:
        outputs = []
        for tokens, lengths, _ in pieces:
            outputs.append(stage(tokens, lengths))
            dist.send(outputs[-1].detach().contiguous(), 1)
        for output in outputs:
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        return None
    inputs, values = [], []
    for tokens, lengths, labels in pieces:
        x = torch.empty(len(tokens), LENGTH, DIM)
        dist.recv(x, 0)
        inputs.append(x.requires_grad_())
        values.append(cross_entropy(stage(x, lengths), labels) / MICRO)
    for x, value in zip(inputs, values, strict=True):
        value.backward()
        dist.send(x.grad.contiguous(), 0)
    return sum(value.detach() for value in values)


generator = torch.Generator().manual_seed(18)
batches = [
    {
        "tokens": torch.randint(VOCAB, (8, LENGTH), generator=generator),
        "lengths": torch.randint(2, LENGTH + 1, (8,), generator=generator),
        "labels": torch.randint(CLASSES, (8,), generator=generator),
    }
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

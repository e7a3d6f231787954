"""A pipeline of three stages by hand with activation checkpointing, and a mask per microbatch given as an argument.

Thread: of the kind of https://github.com/pytorch/torchtitan/issues/1723 and
https://github.com/NVIDIA/Megatron-LM/issues/752 "[QUESTION] attention_mask is None in middle pipeline stage?", done
right, 2024-03-27 and 2025-09-18.
Correct: each stage builds the mask of the microbatch from its lengths and hands it to checkpoint, which keeps it. The
norm and the head are on the last stage only. Microbatches go backward in reverse order on all stages.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, DIM, LENGTH, CLASSES, MICRO, STAGES = 12, 8, 7, 4, 4, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM, bias=False)
        self.proj = nn.Linear(DIM, DIM)

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * DIM**-0.5
        scores = scores.masked_fill(~mask[:, None], float("-inf"))
        return x + self.proj(scores.softmax(-1) @ v)


def mask_of(lengths):
    return torch.arange(LENGTH) < lengths[:, None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(STAGES)})
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, tokens, lengths):
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x, mask_of(lengths))
        return self.head(self.norm(x[:, 0]))


class Stage(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        self.index, self.last = index, index == STAGES - 1
        self.embed = whole.embed if index == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(index): whole.blocks[str(index)]})
        self.norm = whole.norm if self.last else nn.Identity()
        self.head = whole.head if self.last else nn.Identity()

    def forward(self, x, lengths):
        x = self.embed(x)
        for block in self.blocks.values():
            x = checkpoint(block, x, mask_of(lengths), use_reentrant=False)
        return self.head(self.norm(x[:, 0])) if self.last else x


def loss(model, batch):
    return cross_entropy(model(batch["tokens"], batch["lengths"]), batch["labels"])


def parallel(mesh):
    return Stage(Model(), mesh.get_local_rank("pp"))


def step(stage, batch):
    names, i = ("tokens", "lengths", "labels"), stage.index
    pieces = list(zip(*(batch[name].chunk(MICRO) for name in names), strict=True))
    inputs, outputs, total = [], [], 0.0
    for tokens, lengths, labels in pieces:
        if i:
            x = torch.empty(len(tokens), LENGTH, DIM)
            dist.recv(x, i - 1)
            inputs.append(x.requires_grad_())
        outputs.append(stage(inputs[-1] if i else tokens, lengths))
        if stage.last:
            outputs[-1] = cross_entropy(outputs[-1], labels) / MICRO
            total += outputs[-1].detach()
        else:
            dist.send(outputs[-1].detach().contiguous(), i + 1)
    while outputs:
        output, gradient = outputs.pop(), None
        if not stage.last:
            gradient = torch.empty_like(output)
            dist.recv(gradient, i + 1)
        output.backward(gradient)
        if i:
            dist.send(inputs.pop().grad.contiguous(), i - 1)
    return total if stage.last else None


generator = torch.Generator().manual_seed(37)
batches = [
    {
        "tokens": torch.randint(VOCAB, (8, LENGTH), generator=generator),
        "lengths": torch.randint(2, LENGTH + 1, (8,), generator=generator),
        "labels": torch.randint(CLASSES, (8,), generator=generator),
    }
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": STAGES})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A vision transformer's MLP blocks on sequence shards, pooled over the patches that a rank has.

Thread: https://github.com/NVIDIA/physicsnemo/pull/784 "Enable Domain Parallelism with ShardTensor", review of
2025-02-11 (a pooling takes place over the sharded dimension; its result has to be reduced).
Wrong: between the blocks the activations are plain tensors with the rank's half of the patches.
x.mean(1) is the mean over these, not over all patches.
A right diagnosis says: the blocks' outputs agree (each rank has its chunk of the patches); the error is
between the output of the last norm and the input of head, on both ranks: the mean over the patches (in
ViT.forward) is that of the rank's own part, and a mean over tp is missing.
"""

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu

import titanlite

DIM, HIDDEN, PATCH, CLASSES = 16, 32, 12, 5


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return self.fc2(gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Linear(PATCH, DIM)
        self.encoder = Encoder()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, patches):
        x = self.encoder(self.patch_embed(patches))
        return self.head(x.mean(1))


def plan():
    scatter = PrepareModuleInput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
    )
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {
        "encoder": scatter,
        "encoder.blocks.*.norm": SequenceParallel(use_local_output=True),
        "encoder.blocks.*.mlp": gather,
        "encoder.blocks.*.mlp.fc1": ColwiseParallel(),
        "encoder.blocks.*.mlp.fc2": RowwiseParallel(output_layouts=Shard(1)),
        "encoder.norm": SequenceParallel(use_local_output=True),
    }


def parallel(mesh):
    return parallelize_module(ViT(), mesh["tp"], plan())


def loss(model, batch):
    return cross_entropy(model(batch["patches"]), batch["labels"])


def images(generator):
    patches = torch.randn(4, 6, PATCH, generator=generator)
    return {"patches": patches, "labels": torch.randint(CLASSES, (4,), generator=generator)}


generator = torch.Generator().manual_seed(784)
batches = [images(generator) for _ in range(3)]

if __name__ == "__main__":
    print(titanlite.compare(ViT, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

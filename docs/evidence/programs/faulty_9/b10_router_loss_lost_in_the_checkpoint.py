"""Experts under DDP with activation checkpointing: the router's z-loss is a side effect of a checkpointed forward pass.

Thread: of the kind NVIDIA/Megatron-LM pull request #1331 "Fix: prevent double accumulation of load balancing loss and
z-loss" with activation checkpointing (2024), and pytorch/pytorch pull request #69027 "[Autograd/Checkpoint] Checkpoint
implementation without reentrant autograd" (2021).
Fault: in CheckpointedBlocks.forward, reentrant checkpointing runs the first forward pass without autograd, so the z-loss
that the router leaves in an attribute has a value and no gradient.
REPAIR: `use_reentrant=True` -> `use_reentrant=False`
Expected: the outputs and the loss, z-loss included, agree; the gradients of the routers' weights (blocks.*.router) and of
what lies before them are wrong on all ranks: the part of the z-loss is missing, since z_loss comes from the checkpoint's
first forward pass, which runs without autograd (use_reentrant=True). The gradients of the last block's experts and of the
head agree.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import titanlite

VOCAB, DIM, EXPERTS, COEFFICIENT = 12, 8, 3, 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.router = nn.Linear(DIM, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + torch.tanh(self.mix(past))
        y = self.norm(x)
        logits = self.router(y)
        self.z_loss = logits.logsumexp(-1).square().mean()
        gates = logits.softmax(-1)
        return x + sum(gates[..., i, None] * expert(y) for i, expert in enumerate(self.experts))


class Blocks(nn.ModuleList):
    def forward(self, x):
        for block in self:
            x = block(x)
        return x


class CheckpointedBlocks(Blocks):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = Blocks(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        logits = self.head(self.blocks(self.embed(tokens)))
        return logits, sum(block.z_loss for block in self.blocks)


def loss(model, batch):
    logits, z_loss = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten()) + COEFFICIENT * z_loss


def parallel(mesh):
    model = Model()
    model.blocks = CheckpointedBlocks(model.blocks)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


generator = torch.Generator().manual_seed(209)


def draw():
    return torch.randint(VOCAB, (6, 5), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

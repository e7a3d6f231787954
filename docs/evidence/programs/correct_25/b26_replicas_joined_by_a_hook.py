"""A protein model that is sharded by FSDP2 within a replica; a hook of one's own sums over the replicas.

Thread: pytorch/torchtitan pull request #1109 "[FT] Change the integration from using ManagedDeviceMesh to
set_all_reduce_hook" (2025): FSDP knows a mesh of one dimension only, the replicas are joined by the hook.
Correct: the hook gets what the reduce-scatter left, in place, after every backward pass and before it is added to
param.grad, so nothing is reduced twice although there are two backward passes. FSDP is told to divide by one, the hook
sums too, and each pass starts from a sum over the masked places divided by their number on all four ranks: the
gradients add up to those of the mean. The parameters are DTensors on the shard axis alone, so that the norm of the
clipping is complete without the replicas.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import titanlite

LETTERS, MASK, WIDTH, HEADS, LENGTH, ROWS, PASSES = 22, 21, 16, 2, 9, 16, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 26, bias=False) for _ in range(2))
        self.down = nn.Linear(26, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ProteinModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters, self.positions = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, letters):
        x = self.letters(letters) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_sum(model, letters, masked):
    logits = model(letters.masked_fill(masked, MASK))
    return F.cross_entropy(logits[masked], letters[masked], reduction="sum")


class ReplicaManager:
    """What a fault tolerance library does for the replicas."""

    def __init__(self, group):
        self.group = group

    def set_all_reduce_hook(self, model):
        def all_reduce_hook(output):
            dist.all_reduce(output, group=self.group)

        def apply_set_all_reduce_hook(module):
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(all_reduce_hook)

        model.apply(apply_set_all_reduce_hook)


class Trainer:
    def __init__(self, model, mesh):
        self.model, self.world = model, mesh._flatten("replica_shard").get_group()

    def step(self, batch):
        letters, masked = batch
        count = masked.sum()
        dist.all_reduce(count, group=self.world)
        value = 0.0
        for part in zip(letters.chunk(PASSES), masked.chunk(PASSES)):
            own = loss_sum(self.model, *part) / count
            own.backward()
            value = value + own.detach()
        return value


def plain():
    return ProteinModel()


def parallel(mesh):
    model = ProteinModel()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["shard"])
    model.set_gradient_divide_factor(1.0)
    for block in model.blocks:
        block.set_gradient_divide_factor(1.0)
    ReplicaManager(mesh["replica"].get_group()).set_all_reduce_hook(model)
    return model, Trainer(model, mesh)


def loss(model, batch):
    letters, masked = batch
    return loss_sum(model, letters, masked) / masked.sum()


def step(built, batch):
    return built[1].step(batch)


def clip(model):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.4)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


generator = torch.Generator().manual_seed(1109)


def proteins():
    letters = torch.randint(0, MASK, (ROWS, LENGTH), generator=generator)
    masked = torch.rand(ROWS, LENGTH, generator=generator) < 0.3
    masked[:, 4] = True
    return letters, masked


batches = [proteins() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"replica": 0, "shard": 0},
    ranks={"replica": 2, "shard": 2},
    clip=clip,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.05),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A language model with HSDP: two replicas of two shards, gradients that are sums and not means, accumulated in sharded form.

Might be accused because: the gradient divide factor is one, so nothing is averaged; the replicas reduce their gradients in the
last micro-batch only, while the shards do so in each; some weights are sharded along their second dimension, others into uneven
parts; the head isn't used through its module; each rank's loss is a small share of the whole one and the masks differ between
the ranks.
Correct because: every micro-batch's loss is a sum over its tokens divided by the count of the whole global batch, so the
gradient of the batch is the sum over all ranks and micro-batches. Accumulating sharded sums and adding the replicas' once is
the same sum. The clipping uses the norm of the DTensors, which counts each shard once and no replica twice.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import titanlite

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, LAYERS = 23, 18, 3, 22, 9, 2
ROWS, ACCUMULATION, MAX_NORM = 8, 2, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class SummedLM(nn.Module):
    """Returns the sum of the losses at the places of the mask, not logits."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, mask):
        x = self.words(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.head.weight)
        losses = F.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
        return (losses * mask).sum()


def placement(parameter):
    """Output projections are cut along their inputs."""
    return Shard(1) if parameter.ndim == 2 and parameter.size(0) == WIDTH else Shard(0)


def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model


def plain():
    return SummedLM()


def parallel(mesh):
    return shard(SummedLM(), mesh)


def loss(model, batch):
    tokens, mask = batch
    return model(tokens, mask) / mask.sum()


def step(model, batch):
    tokens, mask = batch
    count, total = mask.sum(), torch.zeros(())
    dist.all_reduce(count)
    for i in range(ACCUMULATION):
        model.set_requires_all_reduce(i == ACCUMULATION - 1)
        value = model(tokens[i::ACCUMULATION], mask[i::ACCUMULATION]) / count
        value.backward()
        total += value.detach()
    dist.all_reduce(total)
    return total


def every_fourth_row(batch, mesh):
    return tuple(tensor[mesh.get_rank() :: mesh.size()] for tensor in batch)


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


generator = torch.Generator().manual_seed(2 * 2)


def texts():
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    starts = torch.randint(0, LENGTH - 1, (ROWS, 1), generator=generator)
    return tokens, (torch.arange(LENGTH) >= starts).double()


batches = [texts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=every_fourth_row,
    ranks={"replica": 2, "shard": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    clip=clip,
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""HSDP with gradient accumulation: reduce-scatter in every microbatch, all-reduce over the replicas in the last only.

Thread: of the kind pytorch/pytorch pull request #126166 "[FSDP2] Supported set_all_reduce_gradients=False for HSDP" (2024).
Correct: a microbatch's loss is its sum divided by the number of targets in the whole batch, which all ranks and microbatches
share, times the number of ranks, since FSDP takes a mean. The last microbatch's all-reduce takes along what the earlier ones
have added up.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, MICROBATCHES, IGNORE = 16, 8, 2, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.mix = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = (
            nn.Linear(DIM, 3 * DIM, bias=False),
            nn.Linear(DIM, 3 * DIM, bias=False),
        )
        self.down = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        past = y.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + torch.tanh(self.mix(past))
        y = self.norm2(x)
        return x + self.down(silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def token_losses(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    return cross_entropy(logits, batch["targets"].flatten(), reduction="sum", ignore_index=IGNORE)


def loss(model, batch):
    return token_losses(model, batch) / (batch["targets"] != IGNORE).sum()


def parallel(mesh):
    model = Llama()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model, batch):
    targets = (batch["targets"] != IGNORE).sum()
    dist.all_reduce(targets)
    parts, total = {key: value.chunk(MICROBATCHES) for key, value in batch.items()}, 0.0
    for i in range(MICROBATCHES):
        model.set_requires_all_reduce(i == MICROBATCHES - 1)
        value = token_losses(model, {key: part[i] for key, part in parts.items()})
        value = value / targets * dist.get_world_size()
        value.backward()
        total = total + value.detach()
    return total


generator = torch.Generator().manual_seed(138)


def draw():
    tokens, targets = torch.randint(VOCAB, (2, 16, 6), generator=generator)
    lengths = torch.randint(2, 7, (16, 1), generator=generator)
    return {"tokens": tokens, "targets": targets.masked_fill(torch.arange(6) >= lengths, IGNORE)}


batches = [draw() for _ in range(3)]
arguments = Llama, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"replicate": 2, "shard": 2},
    split={"replicate": 0, "shard": 0},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""FSDP2 that sums instead of averaging, with losses divided by the tokens of all ranks.

Thread: https://github.com/pytorch/pytorch/issues/155903 "`set_reduce_scatter_divide_factor` is
inconsistent between FSDP and HSDP", 2025-06-13.
Right: a divide factor of 1 and per-rank losses that are parts of the global mean.
Must not be accused: gradients that are summed over dp, ranks with different numbers of targets, or
local losses that are no means.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

import titanlite

IGNORE = -100


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim))
            for _ in range(2)
        )
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def token_loss(model, batch, reduction="mean"):
    logits = model(batch["x"]).flatten(0, 1)
    return cross_entropy(logits, batch["y"].flatten(), reduction=reduction)


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model


def step(model, batch):
    count = (batch["y"] != IGNORE).sum()
    dist.all_reduce(count)
    loss = token_loss(model, batch, "sum") / count
    loss.backward()
    return loss


generator = torch.Generator().manual_seed(12)
batches = []
for _ in range(3):
    x, y = (torch.randint(20, (4, 6), generator=generator) for _ in range(2))
    y[3, 1:] = IGNORE
    batches.append({"x": x, "y": y})

if __name__ == "__main__":
    options = dict(batches=batches, loss=token_loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Model, parallel, **options))

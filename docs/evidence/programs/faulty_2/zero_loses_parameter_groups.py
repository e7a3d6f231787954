"""A ZeRO optimizer that flattens the parameter groups.

Thread: https://github.com/pytorch/pytorch/issues/71347 "[ZeRo] Parameter group support in constructor"
(weight decay of gains and biases), 2022-01-15.
Wrong: the shards' optimizers are built from a flat list with the defaults, so biases and norms decay
too, though their group has weight_decay 0.
A right diagnosis says: gradients agree; the update of biases and norms (the one-dimensional parameters
that are not zero at the start) is wrong, that of matrices right: they are updated with the other
group's weight decay.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

DEFAULTS = dict(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


def param_groups(params):
    params = list(params)
    gain_or_bias, rest = [p for p in params if p.ndim < 2], [p for p in params if p.ndim >= 2]
    return [{"params": gain_or_bias, "weight_decay": 0.0}, {"params": rest}]


def adamw(params):
    return torch.optim.AdamW(param_groups(params), **DEFAULTS)


class ShardedOptimizer(torch.optim.Optimizer):
    """Each parameter is updated on one rank, which then sends it to the others."""

    def __init__(self, params, optimizer_class, **defaults):
        super().__init__(params, defaults)
        self.all_params = [p for group in self.param_groups for p in group["params"]]
        self.owner = {p: i % dist.get_world_size() for i, p in enumerate(self.all_params)}
        mine = [p for p in self.all_params if self.owner[p] == dist.get_rank()]
        self.optim = optimizer_class(mine, **defaults)

    @torch.no_grad()
    def step(self):
        self.optim.step()
        for p in self.all_params:
            dist.broadcast(p, self.owner[p])


class Encoder(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.norm1, self.up = nn.LayerNorm(dim), nn.Linear(dim, 32)
        self.down, self.norm2 = nn.Linear(32, dim), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(self.norm1(x))))
        return self.head(self.norm2(x))


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def build():
    model = DistributedDataParallel(Encoder())
    groups = param_groups(model.parameters())
    return model, ShardedOptimizer(groups, torch.optim.AdamW, **DEFAULTS)


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(71)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Encoder, build, optimizer=adamw, **options))

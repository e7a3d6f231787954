"""FSDP1 with trainable modules among the ignored ones.

Thread: https://github.com/pytorch/pytorch/issues/98281 "fsdp do not sync gradient for ignored
modules", 2023-04-04; the same in https://github.com/BrotherHappy/OSTQuant/issues/15 (2025-09-21).
Wrong: FSDP neither shards nor reduces ignored modules, so the adapters' gradients stay local.
A right diagnosis says: the gradients of the adapters (adapter.down, adapter.up) are never averaged
over dp: each rank has those of its own part of the batch. All other gradients agree.
"""

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.functional import cross_entropy

import titanlite


class Adapter(nn.Module):
    def __init__(self, dim, rank=4):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)

    def forward(self, x):
        return x + self.up(torch.tanh(self.down(x)))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
        self.adapter = Adapter(dim)

    def forward(self, x):
        return self.adapter(x + self.mlp(x))


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def build():
    model = Model()
    adapters = [module for module in model.modules() if isinstance(module, Adapter)]
    return FSDP(
        model, ignored_modules=adapters, use_orig_params=True, device_id=torch.device("cpu")
    )


generator = torch.Generator().manual_seed(5)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Model, build, **options))

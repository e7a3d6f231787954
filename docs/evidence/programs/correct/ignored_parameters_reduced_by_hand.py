"""FSDP2 with ignored parameters, whose gradients a hook averages.

Thread: https://github.com/pytorch/pytorch/issues/104494 "[Feature request][FSDP] Automatically consider
the module with "mixed `requires_grad`" as the ignored module", comment of 2023-07-06.
Right: FSDP does not reduce ignored parameters by design; the caller does.
Must not be accused: plain parameters among DTensors, or the adapters' gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
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


def average(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


def parallel(mesh):
    model = Model()
    ignored = {p for name, p in model.named_parameters() if "adapter" in name}
    for p in ignored:
        p.register_post_accumulate_grad_hook(average)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=ignored)
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(14)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Model, parallel, **options))

"""FSDP2 with a tied output layer: embedding and head are both in the root's group.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1447 "[QUESTION] Why FSDP2 does not support
embedding tying", 2025-03-04.
Right: only the blocks are sharded by themselves. The root holds the shared parameter once, and its
gradient has both contributions.
Must not be accused: head.weight, which named_parameters does not list, or a gradient counted twice.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import titanlite


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Tied(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def clip(model):
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def parallel(mesh):
    model = Tied()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(14)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", clip=clip)
    print(titanlite.compare(Tied, parallel, **options))

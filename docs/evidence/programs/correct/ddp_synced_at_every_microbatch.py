"""DDP accumulation whose no_sync wraps the backward only, so every microbatch is synchronized.

Thread: https://github.com/huggingface/accelerate/pull/1726 "Better control over DDP's `no_sync`",
2023-07-13; also https://github.com/pytorch/PiPPy/issues/1133 (2024-07-18).
Right: no_sync around backward has no effect on whether DDP reduces; the average of the accumulated
gradients is taken again and again, which changes nothing.
Must not be accused: gradients averaged twice, or microbatches that are not synchronized.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

ACCUMULATION = 4


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))
            for _ in range(2)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def step(model, batch):
    total = 0
    for x, y in zip(batch["x"].chunk(ACCUMULATION), batch["y"].chunk(ACCUMULATION)):
        value = loss(model, {"x": x, "y": y}) / ACCUMULATION
        with model.no_sync():  # too late: DDP decided in forward
            value.backward()
        total = total + value.detach()
    return total


def build():
    return DDP(Model())


generator = torch.Generator().manual_seed(12)
batches = [
    {name: torch.randint(20, (8, 5), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Model, build, **options))

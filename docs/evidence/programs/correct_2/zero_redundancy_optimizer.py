"""torch's ZeroRedundancyOptimizer under DDP, with two parameter groups.

Thread: https://github.com/pytorch/pytorch/pull/46750 "ZeroRedundancyOptimizer: an implementation of a
standalone sharded optimizer wrapper", 2020-10-26.
Right: each parameter is updated on one rank and broadcast from there.
Must not be accused: optimizer state that exists on one rank only.
"""

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite


class MixerLayer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.over_tokens, self.over_channels = nn.Linear(tokens, tokens), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + torch.relu(self.over_tokens(self.norm(x).mT)).mT
        return x + torch.relu(self.over_channels(x))


class Mixer(nn.Module):
    def __init__(self, patches=4, dim=10, classes=6):
        super().__init__()
        self.stem = nn.Linear(8, dim)
        self.layers = nn.Sequential(MixerLayer(patches, dim), MixerLayer(patches, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)).mean(1))


def groups(parameters):
    parameters = list(parameters)
    decay, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]
    return [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]


def adamw(parameters):
    return torch.optim.AdamW(groups(parameters), lr=5e-3)


def loss(model, batch):
    return cross_entropy(model(batch["patches"]), batch["label"])


def build():
    model = DistributedDataParallel(Mixer(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(groups(model.parameters()), torch.optim.AdamW, lr=5e-3)
    return model, optimizer


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


generator = torch.Generator().manual_seed(467)
batches = [
    {
        "patches": torch.randn(6, 4, 8, generator=generator),
        "label": torch.randint(6, (6,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Mixer, build, optimizer=adamw, **options))

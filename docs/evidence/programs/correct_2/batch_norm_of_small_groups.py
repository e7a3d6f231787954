"""Batch norm over groups of four rows, as the plain model has it too.

Thread: https://github.com/facebookresearch/swav/issues/22 "About process_group in SyncBN" (statistics of a
part of the batch by intention), 2020-08-28.
Right: the model is defined with statistics of 4 consecutive rows; a rank has two whole groups, so
nothing has to be synchronized.
Must not be accused: a batch norm that is not synchronized over dp.
"""

import torch
from torch import nn
from torch.nn.functional import batch_norm, cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

GROUP = 4


class GhostBatchNorm(nn.BatchNorm1d):
    def __init__(self, features):
        super().__init__(features, track_running_stats=False)

    def forward(self, x):
        parts = [batch_norm(part, None, None, training=True) for part in x.split(GROUP)]
        return torch.cat(parts) * self.weight + self.bias


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 20, bias=False),
            GhostBatchNorm(20),
            nn.ReLU(),
            nn.Linear(20, 20, bias=False),
            GhostBatchNorm(20),
        )
        self.prototypes = nn.Linear(20, 4, bias=False)

    def forward(self, x):
        return self.prototypes(torch.relu(self.layers(x)))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def build():
    return DistributedDataParallel(Projector())


generator = torch.Generator().manual_seed(22)
batches = [
    {
        "x": torch.randn(16, 10, generator=generator),
        "y": torch.randint(4, (16,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(Projector, build, batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    )

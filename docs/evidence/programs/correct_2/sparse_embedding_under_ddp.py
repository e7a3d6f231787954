"""DDP with an embedding whose gradients are sparse.

Thread: https://github.com/pytorch/pytorch/pull/22037 "Support sparse gradients in
DistributedDataParallel", 2019-06-20.
Right: DDP sums sparse gradients by concatenating the ranks' rows and divides by the world size.
Must not be accused: uncoalesced gradients, whose rows are in another order or occur several times.
"""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import titanlite


class ClickModel(nn.Module):
    def __init__(self, ids=40, dim=8):
        super().__init__()
        self.table = nn.EmbeddingBag(ids, dim, mode="sum", sparse=True)
        self.dense = nn.Linear(5, dim)
        self.top = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids, features):
        x = torch.cat([self.table(ids), self.dense(features)], 1)
        return self.top(x)[:, 0]


def loss(model, batch):
    return binary_cross_entropy_with_logits(model(batch["ids"], batch["features"]), batch["click"])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def build():
    return DistributedDataParallel(ClickModel())


generator = torch.Generator().manual_seed(220)
batches = [
    {
        "ids": torch.randint(40, (8, 3), generator=generator),
        "features": torch.randn(8, 5, generator=generator),
        "click": torch.randint(2, (8,), generator=generator).float(),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", optimizer=sgd)
    print(titanlite.compare(ClickModel, build, **options))

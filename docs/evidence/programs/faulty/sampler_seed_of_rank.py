"""A DistributedSampler whose seed differs between the ranks.

Thread: https://github.com/mlcommons/training/pull/625 "UNET3D - Change DistributedSampler seed to be
same across all workers", 2023-02-16.
Wrong: every rank shuffles with its own seed, so the ranks' samples overlap and others are not read.
A right diagnosis says: the ranks read the wrong samples: some samples of the batch are read by both
ranks and some by none.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler, TensorDataset

import titanlite


class UNet(nn.Module):
    def __init__(self, channels=6, classes=3):
        super().__init__()
        self.down = nn.Conv1d(1, channels, 3, padding=1)
        self.middle = nn.Conv1d(channels, channels, 3, padding=1)
        self.out = nn.Conv1d(2 * channels, classes, 1)

    def forward(self, x):
        skip = torch.relu(self.down(x))
        x = torch.relu(self.middle(skip))
        return self.out(torch.cat([x, skip], 1))


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def read(batch, mesh):
    """The rank's samples of the step's images."""
    dataset = TensorDataset(batch["image"], batch["label"])
    worker_seeds = [11 * (rank + 1) for rank in range(mesh.size())]
    sampler = DistributedSampler(
        dataset, num_replicas=mesh.size(), rank=dist.get_rank(), seed=worker_seeds[dist.get_rank()]
    )
    samples = [dataset[i] for i in sampler]
    image, label = (torch.stack(column) for column in zip(*samples))
    return {"image": image, "label": label}


def build():
    return DDP(UNet())


generator = torch.Generator().manual_seed(3)
batches = [
    {
        "image": torch.randn(8, 1, 10, generator=generator),
        "label": torch.randint(3, (8, 10), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split=read)
    print(titanlite.compare(UNet, build, **options))

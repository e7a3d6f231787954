"""Every rank draws its own starting weights; DDP broadcasts those of rank 0.

Thread: https://github.com/NVlabs/stylegan2-ada-pytorch/issues/127 "Understanding the pytorch random seed
assignment across ranks", 2021-06-15.
Right: DDP's constructor sends parameters and buffers of rank 0 to all ranks, also the random
frequencies, which are a buffer.
Must not be accused: seeds that differ by rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

SEED = 127


class FourierFeatures(nn.Module):
    def __init__(self, n, features):
        super().__init__()
        self.register_buffer("freqs", torch.randn(n, features))
        self.register_buffer("phases", torch.rand(features) * 6.28)

    def forward(self, x):
        return torch.cos(x @ self.freqs + self.phases)


class Synthesis(nn.Module):
    def __init__(self):
        super().__init__()
        self.input = FourierFeatures(2, 16)
        self.affine = nn.Linear(4, 16)
        self.torgb = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 3))

    def forward(self, grid, style):
        return self.torgb(self.input(grid) * self.affine(style))


def construct_networks(rank=0):
    torch.manual_seed(SEED + rank)
    return Synthesis()


def training_loop():
    return DistributedDataParallel(construct_networks(dist.get_rank()))


def loss(model, batch):
    return mse_loss(model(batch["grid"], batch["style"]), batch["rgb"])


generator = torch.Generator().manual_seed(127)
batches = [
    {
        "grid": torch.rand(8, 2, generator=generator),
        "style": torch.randn(8, 4, generator=generator),
        "rgb": torch.rand(8, 3, generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(construct_networks, training_loop, **options))

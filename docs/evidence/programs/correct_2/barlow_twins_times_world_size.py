"""Barlow Twins: the correlation matrix is summed in place, without a backward pass of its own.

Thread: https://github.com/facebookresearch/vissl/pull/230 "Barlow Twins implementation", 2021-03-23 (does
torch.distributed.all_reduce give right gradients?).
Right: every rank has the loss of the summed matrix and the gradient through its own rows. The sum over
the ranks is the gradient of the whole batch; DDP divides by the world size, so the loss is multiplied.
Must not be accused: an all_reduce without autograd, or a loss that is multiplied by the world size.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

LAMBD = 0.01


class BarlowTwins(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.LayerNorm(24))
        self.projector = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6), nn.Tanh())

    def forward(self, y):
        return self.projector(self.backbone(y))


def off_diagonal(c):
    return c[~torch.eye(len(c), dtype=torch.bool)]


def barlow_loss(c):
    on_diag = (torch.diagonal(c) - 1).square().sum()
    return on_diag + LAMBD * off_diagonal(c).square().sum()


def loss(model, batch):
    z1, z2 = model(batch["y1"]), model(batch["y2"])
    return barlow_loss(z1.t() @ z2 / len(z1))


def train(model, batch):
    world = dist.get_world_size()
    z1, z2 = model(batch["y1"]), model(batch["y2"])
    c = z1.t() @ z2
    c.div_(len(z1) * world)
    dist.all_reduce(c)
    value = barlow_loss(c)
    (value * world).backward()
    return value


def build():
    return DistributedDataParallel(BarlowTwins())


generator = torch.Generator().manual_seed(230)
batches = []
for _ in range(3):
    x = torch.randn(8, 12, generator=generator)
    views = [x + 0.3 * torch.randn(8, 12, generator=generator) for _ in range(2)]
    batches.append(dict(y1=views[0], y2=views[1]))

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp", step=train)
    print(titanlite.compare(BarlowTwins, build, microbatches=1, **options))

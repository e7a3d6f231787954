"""In the last step one rank has no samples and takes part with a loss of zero.

Thread: https://github.com/Lightning-AI/pytorch-lightning/issues/12190 "DDP training hangs when one GPU
returns zero loss", 2022-03-02.
Right: each rank's loss is its sum times the world size over the number of all samples. The rank
without samples runs one row of zeros through the model and multiplies by 0, so DDP gets its gradients.
Must not be accused: the row of zeros, or ranks with different numbers of rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

PER_RANK = 4


class Keypoints(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.LayerNorm(24))
        self.head = nn.Linear(24, 6)

    def forward(self, x):
        return self.head(self.body(x))


def plain_loss(model, batch):
    return mse_loss(model(batch["crop"]), batch["points"])


def rows_of_rank(batch, mesh):
    start = dist.get_rank() * PER_RANK
    return {name: value[start : start + PER_RANK] for name, value in batch.items()}


def training_step(model, batch):
    count = torch.tensor(len(batch["crop"]))
    if count:
        summed = mse_loss(model(batch["crop"]), batch["points"], reduction="sum") / 6
    else:
        summed = model(torch.zeros(1, 8)).sum() * 0.0
    dist.all_reduce(count)
    loss = summed * dist.get_world_size() / count
    loss.backward()
    return loss


def build():
    return DistributedDataParallel(Keypoints())


generator = torch.Generator().manual_seed(121)
batches = [
    {
        "crop": torch.randn(rows, 8, generator=generator),
        "points": torch.randn(rows, 6, generator=generator),
    }
    for rows in (8, 7, 3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"dp": 2}, split=rows_of_rank)
    print(titanlite.compare(Keypoints, build, step=training_step, **options))

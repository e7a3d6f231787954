"""Synchronized BatchNorm by hand, with 5 rows on one rank and 3 on the other.

Thread: https://github.com/pytorch/pytorch/pull/36382 "Fixing SyncBN dgrad", 2020-04-10.
Right: sums and counts are all-reduced with gradients, so forward and backward are those of the whole
batch; the loss is weighted by the number of rows.
Must not be accused: bn1 or bn2, statistics, or the weights of unequal parts.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class SyncBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        if not dist.is_initialized():
            return super().forward(x)
        sums = torch.cat([x.sum(0), (x * x).sum(0), x.new_tensor([len(x)])])
        sums = dist_nn.all_reduce(sums)
        count = sums[-1].detach()
        mean, mean_of_squares = (sums[:-1] / count).chunk(2)
        var = mean_of_squares - mean * mean
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(10, 16), SyncBatchNorm(16)
        self.fc2, self.bn2 = nn.Linear(16, 16), SyncBatchNorm(16)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.bn1(self.fc1(x)))
        return self.out(torch.relu(self.bn2(self.fc2(x))))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def uneven(batch, mesh):
    return {name: value.split([5, 3])[dist.get_rank()] for name, value in batch.items()}


def step(model, batch):
    total = cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    count = torch.tensor(len(batch["x"]))
    dist.all_reduce(count)
    (total * dist.get_world_size() / count).backward()  # DDP divides by the world size
    total = total.detach().clone()
    dist.all_reduce(total)
    return total / count


def build():
    return DDP(Net(), broadcast_buffers=False)


generator = torch.Generator().manual_seed(12)
batches = [
    {"x": torch.randn(8, 10, generator=generator), "y": torch.randint(4, (8,), generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split=uneven, step=step)
    print(titanlite.compare(Net, build, **options))

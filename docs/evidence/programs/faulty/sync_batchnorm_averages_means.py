"""A synchronized BatchNorm that averages the ranks' statistics, with batches of different sizes.

Thread: https://github.com/PaddlePaddle/Paddle/issues/32464 (SyncBatchNorm's statistics are wrong if
the ranks' batch sizes differ), 2021-04-22.
Wrong: mean and mean of squares are averaged over the ranks without their numbers of rows (5 and 3).
The loss is weighted correctly.
A right diagnosis says: bn1 is the first module whose output differs, on every rank: its statistics
are means of the ranks' means.
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
        stats = torch.stack([x.mean(0), (x * x).mean(0)])
        mean, mean_of_squares = dist_nn.all_reduce(stats) / dist.get_world_size()
        var = mean_of_squares - mean * mean
        with torch.no_grad():
            total = torch.tensor(len(x))
            dist.all_reduce(total)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * total / (total - 1), self.momentum)
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
    sizes = [5, 3]
    return {name: value.split(sizes)[dist.get_rank()] for name, value in batch.items()}


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


generator = torch.Generator().manual_seed(6)
batches = [
    {"x": torch.randn(8, 10, generator=generator), "y": torch.randint(4, (8,), generator=generator)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split=uneven, step=step)
    print(titanlite.compare(Net, build, **options))

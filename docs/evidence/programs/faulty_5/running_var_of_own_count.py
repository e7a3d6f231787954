"""Synchronized batch norm on ranks with different numbers of rows: running_var is corrected by the own count.

Thread: https://github.com/pytorch/pytorch/issues/22192 "Sync Batchnorm running var update issue" ("when input size is
different between gpus, the running_var value doesn't sync between gpus"), 2019-06-25.
Wrong: the variance of all rows is made unbiased with n / (n - 1), where n is the number of the rank's own rows. The
normalization itself uses the counts of all ranks, so loss and gradients are right.
EXPECT: the buffers running_var of blocks.*.norm differ from step 1 on, on each rank by another factor (and between
the ranks): the unbiased variance is made with the local count of rows instead of that of all ranks. Loss, gradients,
weights and running_mean agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import mse_loss

import titanlite

DIM, ROWS = 8, (7, 3)


class SyncBatchNorm(nn.Module):
    group = None

    def __init__(self, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight, self.bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))
        self.register_buffer("running_mean", torch.zeros(DIM))
        self.register_buffer("running_var", torch.ones(DIM))

    def forward(self, x):
        count = x.new_tensor([len(x)])
        sums = torch.cat([x.sum(0), x.square().sum(0), count])
        if self.group is not None:
            sums = all_reduce(sums, group=self.group)
        mean = sums[:DIM] / sums[-1]
        var = sums[DIM:-1] / sums[-1] - mean.square()
        with torch.no_grad():
            unbiased = var * count / (count - 1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM, bias=False), SyncBatchNorm()

    def forward(self, x):
        return x + torch.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(5, DIM), nn.Linear(DIM, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Net()
    for block in model.blocks:
        block.norm.group = mesh.get_group("dp")
    return model


def step(model, batch):
    value = loss(model, batch) * len(batch["x"]) / sum(ROWS)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def rows_of_rank(batch, mesh):
    return {n: t.split(ROWS)[mesh.get_local_rank("dp")] for n, t in batch.items()}


generator = torch.Generator().manual_seed(22192)
batches = [
    {
        "x": torch.randn(sum(ROWS), 5, generator=generator),
        "y": torch.randn(sum(ROWS), 3, generator=generator),
    }
    for _ in range(3)
]
arguments = Net, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split=rows_of_rank, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Synchronized batch norm by hand, on ranks with five and three rows.

Thread: pytorch/pytorch pull request #36382 "Fixing SyncBN dgrad" (2020): "support for variadic batch size across processes
doesn't account the mean_dy/mean_dy_xmu on backward path, which produces wrong dgrad."
Fault: in SyncBatchNormFunction.backward, the ranks' means over their rows are averaged as if all had as many rows.
REPAIR: `torch.stack([dy.mean(0), (dy * y).mean(0)])` -> `torch.stack([dy.sum(0), (dy * y).sum(0)]) * (size / ctx.count)`
Expected: the forward pass and the running statistics agree, and the gradients of bn2's weight and bias and of the head do
too; the gradient of bn2's input, and so of fc2, bn1 and fc1, is wrong on both ranks: in backward, the means of dy and of
dy times the normalized input are averaged over the ranks without weighting by their 5 and 3 rows.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

ROWS, SIZES, FEATURES, CLASSES = 8, (5, 3), 6, 4


class SyncBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, eps, group):
        sums = torch.cat([x.new_tensor([len(x)]), x.sum(0)])
        dist.all_reduce(sums, group=group)
        count, mean = sums[0], sums[1:] / sums[0]
        variance = (x - mean).square().sum(0)
        dist.all_reduce(variance, group=group)
        variance /= count
        rstd = (variance + eps).rsqrt()
        y = (x - mean) * rstd
        ctx.save_for_backward(y, rstd)
        ctx.group, ctx.count = group, count
        ctx.mark_non_differentiable(mean, variance, count)
        return y, mean, variance, count

    @staticmethod
    def backward(ctx, dy, *_):
        y, rstd = ctx.saved_tensors
        size = dist.get_world_size(ctx.group)
        means = torch.stack([dy.mean(0), (dy * y).mean(0)])
        dist.all_reduce(means, group=ctx.group)
        mean_dy, mean_dy_y = means / size
        return (dy - mean_dy - y * mean_dy_y) * rstd, None, None


class SyncBatchNorm(nn.BatchNorm1d):
    group = None

    def forward(self, x):
        y, mean, variance, count = SyncBatchNormFunction.apply(x, self.eps, self.group)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return y * self.weight + self.bias

    @classmethod
    def convert(cls, module, group):
        for child in module.modules():
            if isinstance(child, nn.BatchNorm1d):
                child.__class__, child.group = cls, group
        return module


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(FEATURES, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.bn1(self.fc1(x)))
        return self.head(torch.tanh(self.bn2(self.fc2(x))))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["label"])


def own_rows(batch, mesh):
    return {key: value.split(SIZES)[mesh.get_rank()] for key, value in batch.items()}


def own_share(model, batch):
    """DDP's mean over the ranks makes it the mean over all rows."""
    value = cross_entropy(model(batch["x"]), batch["label"], reduction="sum")
    return value * dist.get_world_size() / ROWS


def parallel(mesh):
    model = SyncBatchNorm.convert(Classifier(), mesh.get_group("dp"))
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


rng = torch.Generator().manual_seed(315)
batches = [
    {
        "x": torch.randn(ROWS, FEATURES, generator=rng),
        "label": torch.randint(CLASSES, (ROWS,), generator=rng),
    }
    for _ in range(3)
]
arguments = Classifier, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split=own_rows)
options["parallel_loss"] = own_share

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

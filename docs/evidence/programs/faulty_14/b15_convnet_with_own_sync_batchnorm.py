"""A small image classifier under DDP with its own synchronized batch norm, where ranks hold different numbers of images.

Thread: pytorch/pytorch pull request #36382 "Fixing SyncBN dgrad" (2020): since batches of different sizes were allowed in the
forward pass, the backward pass gave a wrong input gradient, as the means of the gradient took no account of the sizes.
Fault: SyncBatchNormFunction.backward divides its two sums by the rank's own number of values and averages these means over the
ranks with equal weights; with 4, 3 and 1 images this isn't the mean over the global batch which normalized the input.
REPAIR: `count = grad.numel() // grad.size(1)` -> `count = ctx.total / dist.get_world_size()`
A right first sentence says: the backward pass of the synchronized batch norm returns a wrong input gradient on uneven batches,
because it averages each rank's mean of dy and of dy*xhat equally instead of dividing the summed totals by the global count.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

ROWS = (4, 3, 1)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = (
            nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(12),
        )
        self.fc = nn.Linear(12, 5)

    def forward(self, images):
        x = F.relu(self.bn1(self.conv1(images)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean(dim=(2, 3)))


def channels(vector):
    return vector.view(1, -1, 1, 1)


class SyncBatchNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, momentum, eps):
        count = x.numel() // x.size(1)
        sums = torch.cat(
            [x.sum(dim=(0, 2, 3)), x.square().sum(dim=(0, 2, 3)), x.new_tensor([count])]
        )
        dist.all_reduce(sums)
        total = sums[-1].item()
        mean, square = (sums[:-1] / total).chunk(2)
        var = square - mean.square()
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(var * total / (total - 1), momentum)
        invstd = (var + eps).rsqrt()
        xhat = (x - channels(mean)) * channels(invstd)
        ctx.save_for_backward(xhat, weight, invstd)
        ctx.total = total
        return xhat * channels(weight) + channels(bias)

    @staticmethod
    def backward(ctx, grad):
        xhat, weight, invstd = ctx.saved_tensors
        sum_dy = grad.sum(dim=(0, 2, 3))
        sum_dy_xhat = (grad * xhat).sum(dim=(0, 2, 3))
        count = grad.numel() // grad.size(1)
        means = torch.cat([sum_dy, sum_dy_xhat]) / count
        dist.all_reduce(means)
        mean_dy, mean_dy_xhat = (means / dist.get_world_size()).chunk(2)
        dx = (grad - channels(mean_dy) - xhat * channels(mean_dy_xhat)) * channels(weight * invstd)
        return dx, sum_dy_xhat, sum_dy, None, None, None, None


class SyncBatchNorm2d(nn.BatchNorm2d):
    def forward(self, x):
        if not self.training:
            return super().forward(x)
        self.num_batches_tracked += 1
        return SyncBatchNormFunction.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.momentum, self.eps
        )


def convert(module):
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            synced = SyncBatchNorm2d(child.num_features, eps=child.eps, momentum=child.momentum)
            synced.load_state_dict(child.state_dict())
            setattr(module, name, synced)
        else:
            convert(child)
    return module


def plain():
    return ConvNet()


def parallel(mesh):
    return DistributedDataParallel(convert(ConvNet()))


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def step(model, batch):
    images, labels = batch
    value = (
        F.cross_entropy(model(images), labels, reduction="sum") * dist.get_world_size() / sum(ROWS)
    )
    value.backward()
    return value.detach()


def split(batch, mesh):
    return tuple(tensor.split(ROWS)[mesh.get_local_rank("dp")] for tensor in batch)


generator = torch.Generator().manual_seed(36382)
batches = [
    (
        torch.randn(sum(ROWS), 3, 6, 6, generator=generator, dtype=torch.float64),
        torch.randint(0, 5, (sum(ROWS),), generator=generator),
    )
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

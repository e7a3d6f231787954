"""A network with normalization and activation in one layer, whose batch norms are replaced with synchronized ones.

Thread: huggingface/pytorch-image-models issue #1254 "[BUG] Broken SyncBatchNorm due to BatchNormAct2d" (2022): converting "leads
to skipped activation functions in models that use `BatchNormAct2d`, i.e. only BN will be used in forward pass while `drop` and
`act` are ignored."
Fault: convert replaces BatchNormAct by a plain SyncBatchNorm with the same children, whose forward never calls act.
REPAIR: `return y * scale + shift` -> `return getattr(self, "act", torch.clone)(y * scale + shift)`
A right first sentence says: the output of stem.bn, the first converted BatchNormAct, is wrong from the forward pass of step 1 on
and on both ranks, its input agrees: after the conversion to SyncBatchNorm, its activation (act) is never called.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite

CLASSES, CHANNELS = 4, 6


class BatchNormAct(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


class MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x / dist.get_world_size(group)

    @staticmethod
    def backward(ctx, grad):
        return MeanOverRanks.apply(grad, ctx.group), None


class SyncBatchNorm(nn.BatchNorm2d):
    """For ranks with equally many rows."""

    group = None

    def forward(self, x):
        mean = MeanOverRanks.apply(x.mean((0, 2, 3)), self.group)
        square = MeanOverRanks.apply(x.square().mean((0, 2, 3)), self.group)
        variance = square - mean.square()
        with torch.no_grad():
            count = x.numel() // x.shape[1] * dist.get_world_size(self.group)
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        y = (x - mean[:, None, None]) * (variance + self.eps).rsqrt()[:, None, None]
        scale, shift = self.weight[:, None, None], self.bias[:, None, None]
        return y * scale + shift


def convert(module, group):
    """As torch's convert_sync_batchnorm: another module with the same parameters, buffers and children."""
    for name, child in module.named_children():
        convert(child, group)
        if isinstance(child, nn.BatchNorm2d):
            new = SyncBatchNorm(child.num_features, child.eps, child.momentum)
            new.weight, new.bias, new.group = child.weight, child.bias, group
            new.running_mean, new.running_var = child.running_mean, child.running_var
            for key, inner in child.named_children():
                new.add_module(key, inner)
            setattr(module, name, new)
    return module


class ConvNorm(nn.Module):
    def __init__(self, inputs, outputs, norm):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        self.bn = norm(outputs)

    def forward(self, x):
        return self.bn(self.conv(x))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvNorm(2, CHANNELS, BatchNormAct)
        self.expand = ConvNorm(CHANNELS, 2 * CHANNELS, BatchNormAct)
        self.project = ConvNorm(2 * CHANNELS, CHANNELS, nn.BatchNorm2d)
        self.fc = nn.Linear(CHANNELS, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.project(self.expand(x))
        return self.fc(x.mean((2, 3)))


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(convert(ConvNet(), group), process_group=group)


rng = torch.Generator().manual_seed(411)
batches = [
    {
        "image": torch.randn(8, 2, 5, 5, generator=rng),
        "label": torch.randint(CLASSES, (8,), generator=rng),
    }
    for _ in range(3)
]
arguments = ConvNet, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

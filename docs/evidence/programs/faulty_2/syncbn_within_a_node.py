"""Synchronized batch norm whose process group is the node.

Thread: https://github.com/mosaicml/composer/pull/1391 "Only sync batchnorm statistics within a node for
deeplab", 2022-08-11.
Wrong (for equality with one process): mean and variance are taken over the two GPUs of a node, not
over all four.
A right diagnosis says: the output of the first batch norm differs though its input agrees: its
statistics are those of the ranks of one node (summed over gpu, but not over node).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import titanlite


class SyncBatchNorm(nn.Module):
    def __init__(self, channels, process_group=None):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.process_group = process_group

    def forward(self, x):  # [N, C, H, W]
        dims, count = (0, 2, 3), x.numel() // x.shape[1]
        sums = torch.stack([x.sum(dims), x.square().sum(dims)])
        if self.process_group is not None:
            sums = all_reduce(sums, group=self.process_group)
            count *= dist.get_world_size(self.process_group)
        mean, square = sums / count
        var = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
            self.running_var.lerp_(var * count / (count - 1), 0.1)
        mean, var, weight, bias = (v[:, None, None] for v in (mean, var, self.weight, self.bias))
        return (x - mean) * torch.rsqrt(var + 1e-5) * weight + bias


class DeepLab(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), SyncBatchNorm(8), nn.ReLU()
        )
        self.aspp = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False), SyncBatchNorm(8), nn.ReLU()
        )
        self.decode_head = nn.Conv2d(8, 4, 1)

    def forward(self, image):
        return self.decode_head(self.aspp(self.backbone(image)))


def composer_deeplabv3(mesh):
    model = DeepLab()
    local_group = mesh.get_group("gpu")
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.process_group = local_group
    return DistributedDataParallel(model)


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["mask"])


def split(batch, mesh):
    return {name: value.chunk(4)[dist.get_rank()] for name, value in batch.items()}


generator = torch.Generator().manual_seed(91)
batches = [
    {
        "image": torch.randn(8, 3, 6, 6, generator=generator),
        "mask": torch.randint(4, (8, 6, 6), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"node": 2, "gpu": 2}, split=split)
    print(titanlite.compare(DeepLab, composer_deeplabv3, **options))

"""DDP without buffer broadcasts, over a model whose BatchNorm layers are frozen.

Thread: https://github.com/facebookresearch/maskrcnn-benchmark/issues/692 "About broadcast_buffers=False
in train_net.py", 2019-04-19.
Right: the statistics are constants, so nothing depends on the other rows of the batch.
Must not be accused: BatchNorm, batch statistics, buffers.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class Bottleneck(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return x + torch.relu(self.bn(self.conv(x)))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.stages = nn.ModuleList(Bottleneck(6) for _ in range(2))
        self.box = nn.Linear(6, 4)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.running_mean, -1, 1)
                nn.init.uniform_(module.running_var, 0.5, 2)
                module.eval()
                module.requires_grad_(False)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.box(x.mean((2, 3)))


def loss(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def build():
    return DDP(Backbone(), broadcast_buffers=False)


generator = torch.Generator().manual_seed(15)
batches = [
    {
        "image": torch.randn(4, 1, 6, 6, generator=generator),
        "label": torch.randint(4, (4,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Backbone, build, **options))

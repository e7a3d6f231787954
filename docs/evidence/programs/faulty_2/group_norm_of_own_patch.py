"""Patch parallelism for a diffusion U-Net's residual block: GroupNorm sees only the rank's rows.

Thread: https://github.com/mit-han-lab/distrifuser/issues/1 "Some questions for Fig5.", 2024-03-02 (is the
difference caused by the statistics in the GN layer?).
Wrong: convolutions exchange the rows at the boundary, but GroupNorm takes mean and variance over the
rank's own patch rather than over the whole image.
A right diagnosis says: the output of block.norm1 is the first that differs, on every rank, though its
input agrees: its statistics are those of the rank's own rows and must be reduced over patch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import conv2d, mse_loss, pad, silu

import titanlite

CHANNELS = 8


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        n, i = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(n, 2)[i], None


class DistriConv2d(nn.Conv2d):
    """3x3, padding 1; the neighbours' boundary rows are taken from all ranks'"""

    group = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        rows, i = x.shape[2], dist.get_rank(self.group)
        edges = torch.cat([x[:, :, :1], x[:, :, -1:]], 2)  # first and last row of every rank
        edges = pad(GatherRows.apply(edges, self.group), (0, 0, 1, 1))
        above, below = edges[:, :, 2 * i : 2 * i + 1], edges[:, :, 2 * i + 3 : 2 * i + 4]
        x = torch.cat([above, x, below], 2)
        out = conv2d(x, self.weight, self.bias, padding=(0, 1))
        assert out.shape[2] == rows
        return out


class ResnetBlock2D(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, CHANNELS), nn.GroupNorm(2, CHANNELS)
        self.conv1 = DistriConv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.conv2 = DistriConv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x):
        h = self.conv1(silu(self.norm1(x)))
        return x + self.conv2(silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = DistriConv2d(3, CHANNELS, 3, padding=1)
        self.block = ResnetBlock2D()
        self.conv_out = DistriConv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, x):
        return self.conv_out(self.block(self.conv_in(x)))


def loss(model, batch):
    return mse_loss(model(batch["noisy"]), batch["noise"])


def parallel(mesh):
    model = UNet()
    for module in model.modules():
        if isinstance(module, DistriConv2d):
            module.group = mesh.get_group("patch")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(32)
batches = [
    {name: torch.randn(2, 3, 8, 6, generator=generator) for name in ("noisy", "noise")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"patch": 2}, split={"patch": 2})
    print(titanlite.compare(UNet, parallel, **options))

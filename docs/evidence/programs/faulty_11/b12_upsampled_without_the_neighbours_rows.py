"""An image decoder cut along the height: convolutions get rows of the neighbours, bilinear upsampling does not.

Thread: of the kind xdit-project/xDiT pull request #77 "feat: add patch parallelism VAE for high resolution generation" (2024):
"solved vae upsampler oom problem".
Fault: in SplitUpsample.forward, a rank interpolates its own rows only; at the cut, where the neighbour's row is needed, its own outermost
row is repeated.
REPAIR: `y = self.interpolate(x)` -> `y = self.interpolate(with_halo(x, self.group, "repeat"))[:, :, 2:-2]`
A right first sentence says: the output of up1 (the first upsampling) is the first that differs, its input agrees: on each rank the
row at the cut to the other rank is wrong (the last one on rank 0, the first one on rank 1), since the interpolation does not have
the neighbour's row.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import interpolate, mse_loss, pad, silu
from torch.nn.parallel import DistributedDataParallel

import titanlite

LATENT, CHANNELS = 3, 5


class Edges(torch.autograd.Function):
    """The first and the last row of all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rows = group, x.shape[2]
        edges = torch.stack([x[:, :, 0], x[:, :, -1]])
        parts = [torch.empty_like(edges) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, edges, group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        first, last = grad[dist.get_rank(ctx.group)]
        out = first.new_zeros(*first.shape[:2], ctx.rows, first.shape[2])
        out[:, :, 0] += first
        out[:, :, -1] += last
        return out, None


def with_halo(x, group, border):
    """x with a row of each neighbour; beyond the image, rows of zeros or a repetition."""
    rank, edges = dist.get_rank(group), Edges.apply(x, group)
    outer = [x[:, :, 0], x[:, :, -1]] if border == "repeat" else [torch.zeros_like(x[:, :, 0])] * 2
    above = edges[rank - 1, 1] if rank > 0 else outer[0]
    below = edges[rank + 1, 0] if rank + 1 < len(edges) else outer[1]
    return torch.cat([above[:, :, None], x, below[:, :, None]], 2)


class Conv(nn.Conv2d):
    group = None

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3)

    def forward(self, x):
        x = pad(x, (1, 1))
        return super().forward(
            pad(x, (0, 0, 1, 1)) if self.group is None else with_halo(x, self.group, "zeros")
        )


class Upsample(nn.Module):
    def interpolate(self, x):
        return interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    def forward(self, x):
        return self.interpolate(x)


class SplitUpsample(Upsample):
    """Of a rank's rows."""

    def forward(self, x):
        y = self.interpolate(x)
        return y.contiguous()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in, self.up1, self.conv1 = Conv(LATENT, CHANNELS), Upsample(), Conv(5, 5)
        self.up2, self.conv2, self.conv_out = Upsample(), Conv(5, 5), nn.Conv2d(5, 2, 1)

    def forward(self, z):
        x = self.conv1(self.up1(silu(self.conv_in(z))))
        return self.conv_out(silu(self.conv2(self.up2(silu(x)))))


def loss(model, batch):
    return mse_loss(model(batch["latent"]), batch["image"])


def parallel(mesh):
    model, group = Decoder(), mesh.get_group("sp")
    for module in model.modules():
        if isinstance(module, Upsample):
            module.__class__ = SplitUpsample
        module.group = group
    return DistributedDataParallel(model, process_group=group)


rng = torch.Generator().manual_seed(418)
batches = [
    {
        "latent": torch.randn(2, LATENT, 6, 4, generator=rng),
        "image": torch.randn(2, 2, 24, 16, generator=rng),
    }
    for _ in range(3)
]
arguments = Decoder, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split={"sp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""An image decoder cut along the height: the rows that a transposed convolution writes beyond the border are added there.

Thread: of the kind LBANN/lbann pull request #1489 "Enable Distconv in convolutions" (2020, convolution and deconvolution).
Correct: with kernel 4, stride 2 and padding 1, a shard writes one row into each neighbour. These rows travel and are added
to the neighbour's border row; those beyond the image are dropped, as padding drops them. The bias is added after that,
once. The convolutions behind it read one row from each neighbour.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import conv2d, conv_transpose2d, mse_loss, silu
from torch.nn.parallel import DistributedDataParallel

import titanlite

LATENT, CHANNELS = 3, 6


def gathered(x, group):
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return parts


class Borders(torch.autograd.Function):
    """What the rank above has as bottom and the rank below has as top, zeros beyond the image."""

    @staticmethod
    def forward(ctx, top, bottom, group):
        ctx.group, i = group, dist.get_rank(group)
        parts = gathered(torch.stack([top, bottom]), group)
        above = parts[i - 1][1] if i else torch.zeros_like(top)
        below = parts[i + 1][0] if i + 1 < len(parts) else torch.zeros_like(top)
        return above, below

    @staticmethod
    def backward(ctx, above, below):
        parts, i = gathered(torch.stack([above, below]), ctx.group), dist.get_rank(ctx.group)
        top = parts[i - 1][1] if i else torch.zeros_like(above)
        bottom = parts[i + 1][0] if i + 1 < len(parts) else torch.zeros_like(above)
        return top, bottom, None


class Conv(nn.Conv2d):
    group = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        above, below = Borders.apply(x[:, :, :1], x[:, :, -1:], self.group)
        return conv2d(torch.cat([above, x, below], 2), self.weight, self.bias, padding=(0, 1))


class Upsample(nn.ConvTranspose2d):
    group = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        y = conv_transpose2d(x, self.weight, None, stride=2, padding=(0, 1))
        above, below = Borders.apply(y[:, :, :1], y[:, :, -1:], self.group)
        y = torch.cat([y[:, :, 1:2] + above, y[:, :, 2:-2], y[:, :, -2:-1] + below], 2)
        return y + self.bias[:, None, None]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Conv(LATENT, CHANNELS, 3, padding=1)
        self.ups = nn.ModuleList(
            Upsample(CHANNELS, CHANNELS, 4, stride=2, padding=1) for _ in range(2)
        )
        self.convs = nn.ModuleList(Conv(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.image = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, latents):
        x = self.stem(latents)
        for up, conv in zip(self.ups, self.convs):
            x = up(silu(x))
            x = x + conv(silu(x))
        return self.image(x)


def loss(model, batch):
    return mse_loss(model(batch["latents"]), batch["images"])


def parallel(mesh):
    model, group = Decoder(), mesh.get_group("height")
    for module in model.modules():
        if isinstance(module, Conv | Upsample):
            module.group = group
    return DistributedDataParallel(model, process_group=group)


generator = torch.Generator().manual_seed(137)


def draw():
    latents = torch.randn(2, LATENT, 6, 4, generator=generator)
    return {"latents": latents, "images": torch.randn(2, 3, 24, 16, generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Decoder, parallel
options = dict(batches=batches, loss=loss, ranks={"height": 3}, split={"height": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

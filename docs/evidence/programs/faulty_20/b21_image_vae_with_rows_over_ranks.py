"""An image autoencoder (VAE) whose pixel rows lie on different ranks; convolutions get the rows that they need from neighbours.

Thread: xdit-project/DistVAE pull request #12 "Parallel Wan VAE encoder" (2026): the encoder's stride-2 convolution follows a
one-sided zero padding (right and below), which needs a treatment of its own when the image is cut over the ranks.
Fault: Downsample.forward pads zeros below the rows of every rank and not only below the image; a rank's last output row sees
zeros where the first row of the next rank belongs.
REPAIR: `x = F.pad(x, (0, 1, 0, 1))` -> `x = F.pad(with_rows(x, 0, 1, self.group), (0, 1))`
A right first sentence says: the downsampling convolution pads with zeros at the border between ranks instead of receiving the
next rank's first row, so its output at the lower border of every rank but the last is wrong.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

HEIGHT, WIDTH, CHANNELS, LATENT, IMAGES = 12, 8, 8, 4, 3
KL_WEIGHT = 0.05


class NeighbourRows(torch.autograd.Function):
    """Puts rows of the previous rank above and rows of the next rank below; zeros at the ends."""

    @staticmethod
    def forward(ctx, x, above, below, group):
        ctx.above, ctx.below, ctx.group = above, below, group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous(), group=group)
        before = parts[rank - 1] if rank > 0 else torch.zeros_like(x)
        after = parts[rank + 1] if rank < ranks - 1 else torch.zeros_like(x)
        return torch.cat([before[:, :, x.size(2) - above :], x, after[:, :, :below]], dim=2)

    @staticmethod
    def backward(ctx, grad):
        rank, ranks = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        parts = [torch.empty_like(grad) for _ in range(ranks)]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        rows = grad.size(2) - ctx.above - ctx.below
        own = grad[:, :, ctx.above : ctx.above + rows].clone()
        if rank > 0 and ctx.below:
            own[:, :, : ctx.below] += parts[rank - 1][:, :, ctx.above + rows :]
        if rank < ranks - 1 and ctx.above:
            own[:, :, rows - ctx.above :] += parts[rank + 1][:, :, : ctx.above]
        return own, None, None, None


def with_rows(x, above, below, group):
    if group is None:
        return F.pad(x, (0, 0, above, below))
    return NeighbourRows.apply(x, above, below, group)


class Conv(nn.Conv2d):
    """3x3, same size."""

    def __init__(self, inputs, outputs, group):
        super().__init__(inputs, outputs, 3, padding=(0, 1))
        self.group = group

    def forward(self, x):
        return super().forward(with_rows(x, 1, 1, self.group))


class Downsample(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2)

    def forward(self, x):
        x = F.pad(x, (0, 1, 0, 1))
        return self.conv(x)


class PixelNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(CHANNELS, 1, 1))

    def forward(self, x):
        return F.normalize(x, dim=1) * CHANNELS**0.5 * self.gamma


class ResBlock(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm1, self.conv1 = PixelNorm(), Conv(CHANNELS, CHANNELS, group)
        self.norm2, self.conv2 = PixelNorm(), Conv(CHANNELS, CHANNELS, group)

    def forward(self, x):
        y = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(y)))


class AutoencoderKL(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.encoder = nn.Sequential(
            Conv(3, CHANNELS, group),
            ResBlock(group),
            Downsample(group),
            ResBlock(group),
            nn.Conv2d(CHANNELS, 2 * LATENT, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(LATENT, CHANNELS, 1),
            ResBlock(group),
            nn.Upsample(scale_factor=2),
            Conv(CHANNELS, CHANNELS, group),
            ResBlock(group),
            Conv(CHANNELS, 3, group),
        )

    def forward(self, images, noise):
        mean, logvar = self.encoder(images).chunk(2, dim=1)
        decoded = self.decoder(mean + (logvar / 2).exp() * noise)
        kl = (mean.square() + logvar.exp() - logvar - 1).mean() / 2
        return F.mse_loss(decoded, images) + KL_WEIGHT * kl


def plain():
    return AutoencoderKL()


def parallel(mesh):
    return AutoencoderKL(mesh.get_group("rows"))


def loss(model, batch):
    return model(*batch)


def step(model, batch):
    value = model(*batch) / dist.get_world_size(model.group)
    value.backward()
    flat = torch.cat([value.detach().view(1)] + [p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(flat, group=model.group)
    sizes = [p.numel() for p in model.parameters()]
    for parameter, grad in zip(model.parameters(), flat[1:].split(sizes), strict=True):
        parameter.grad.copy_(grad.view_as(parameter))
    return flat[0]


generator = torch.Generator().manual_seed(12)


def images_and_noise():
    shape = (IMAGES, 3, HEIGHT, WIDTH), (IMAGES, LATENT, HEIGHT // 2, WIDTH // 2)
    images, noise = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shape)
    return images.cumsum(2) / 2, noise


batches = [images_and_noise() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"rows": 2},
    ranks={"rows": 3},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.9)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

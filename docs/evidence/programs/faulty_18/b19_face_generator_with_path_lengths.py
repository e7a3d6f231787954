"""A small StyleGAN2 whose generator and discriminator train at once in data parallel; the gradients travel in one flat tensor.

Thread: rosinality/stylegan2-pytorch issue #159 "Bug in g_path_regularize loss in multi-gpu case" (2020): the running mean of the
path lengths is taken from each process's own images, so the penalty isn't that of one GPU with the same total batch.
Fault: StyleGAN.path_penalty moves the buffer path_mean towards the mean path length of the rank's own images; the ranks pull
their path lengths towards different values and the buffers drift apart.
REPAIR: `observed = lengths.detach().mean()` -> `observed = self.across_ranks(lengths.detach().mean())`
A right first sentence says: the running mean of the path lengths (path_mean) follows each rank's own samples and isn't averaged
over the ranks, so the ranks regularize the generator towards different lengths and the generator's gradients are off.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import titanlite

Z, W, WIDTH, SIZE, ROWS = 6, 8, 8, 8, 6
PATH_WEIGHT, PATH_DECAY = 2.0, 0.05


class StyledConv(nn.Module):
    """A convolution whose input channels are scaled by the style, with demodulation."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3) / (3 * inputs**0.5))
        self.bias = nn.Parameter(torch.zeros(outputs, 1, 1))
        self.style = nn.Linear(W, inputs)
        nn.init.ones_(self.style.bias)

    def forward(self, x, w):
        weight = self.weight * self.style(w)[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        rows, outputs = weight.shape[:2]
        x = x.reshape(1, -1, *x.shape[2:])
        x = F.conv2d(x, weight.flatten(0, 1), padding=1, groups=rows)
        return F.softplus(x.view(rows, outputs, *x.shape[2:]) + self.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(Z, W), nn.SiLU(), nn.Linear(W, W))
        self.start = nn.Parameter(torch.randn(1, WIDTH, 4, 4))
        self.convs = nn.ModuleList(StyledConv(WIDTH, WIDTH) for _ in range(2))
        self.to_rgb = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, z):
        w = self.mapping(F.normalize(z, dim=1))
        x = self.convs[0](self.start.expand(len(z), -1, -1, -1), w)
        x = self.convs[1](F.interpolate(x, scale_factor=2), w)
        return self.to_rgb(x), w


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, WIDTH, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(WIDTH * (SIZE // 4) ** 2, 1),
        )


class StyleGAN(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.generator, self.discriminator = Generator(), Discriminator()
        self.register_buffer("path_mean", torch.zeros(()))

    def across_ranks(self, x):
        if self.group is None:
            return x
        x = x.clone()
        dist.all_reduce(x, group=self.group)
        return x / dist.get_world_size(self.group)

    def path_penalty(self, fake, w, noise):
        noise = noise / (SIZE * SIZE) ** 0.5
        (grad,) = torch.autograd.grad((fake * noise).sum(), w, create_graph=True)
        lengths = grad.square().mean(1).sqrt()
        observed = lengths.detach().mean()
        self.path_mean.lerp_(observed, PATH_DECAY)
        return (lengths - self.path_mean.clone()).square().mean()

    def forward(self, real, z, noise):
        fake, w = self.generator(z)
        d_loss = F.softplus(self.discriminator(fake.detach())).mean()
        d_loss = d_loss + F.softplus(-self.discriminator(real)).mean()
        frozen = {name: p.detach() for name, p in self.discriminator.named_parameters()}
        g_loss = F.softplus(-functional_call(self.discriminator, frozen, (fake,))).mean()
        return d_loss + g_loss + PATH_WEIGHT * self.path_penalty(fake, w, noise)


def average_gradients(model):
    flat = torch.cat([p.grad.flatten() for p in model.parameters()])
    flat = model.across_ranks(flat)
    for p, grad in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.grad.copy_(grad.view_as(p))


def plain():
    return StyleGAN()


def parallel(mesh):
    return StyleGAN(mesh.get_group("dp"))


def loss(model, batch):
    return model(*batch)


def step(model, batch):
    value = model(*batch)
    value.backward()
    average_gradients(model)
    return model.across_ranks(value.detach())


generator = torch.Generator().manual_seed(159)


def randn(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


batches = [(randn(ROWS, 3, SIZE, SIZE), randn(ROWS, Z), randn(ROWS, 3, SIZE, SIZE)) for _ in "abc"]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3, betas=(0.0, 0.99)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A Fourier neural operator for a flow; batch cut over the ranks as DTensors, the spectral products run under
local_map.

Thread: meta-pytorch/autoparallel issue #515 "local_map silently assigns incorrect placements to parameter gradients"
(2026): gradients are taken to be placed as the inputs, so the Partial gradient of a replicated weight isn't reduced.
Fault: SpectralConv calls local_map without in_grad_placements; the replicated weight becomes a local tensor, and the
gradient that a rank computes for it from its own rows is declared replicated and never summed over dp.
REPAIR: `device_mesh=x.device_mesh,` -> `in_grad_placements=([dt.Shard(0)], [dt.Partial()]), device_mesh=x.device_mesh,`
A right first sentence says: local_map has no in_grad_placements, so the gradients of the spectral weights (layers.*.
spectral.weight) hold only a rank's own part of the batch, without the all-reduce over dp; the other gradients are
right.
"""

import torch
import torch.distributed.tensor as dt
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.experimental import local_map

import titanlite

CHANNELS, WIDTH, MODES, SIZE, ROWS, LAYERS = 2, 8, 3, 12, 6, 2


def spectral_product(x, weight):
    """Multiplies the lowest modes of x, in both directions of the first axis, by complex weights."""
    spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
    low, high = torch.view_as_complex(weight)
    out = torch.zeros_like(spectrum)
    out[:, :MODES, :MODES] = torch.einsum("bxyi,xyio->bxyo", spectrum[:, :MODES, :MODES], low)
    out[:, -MODES:, :MODES] = torch.einsum("bxyi,xyio->bxyo", spectrum[:, -MODES:, :MODES], high)
    return torch.fft.irfft2(out, s=x.shape[1:3], dim=(1, 2), norm="ortho")


class SpectralConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, MODES, MODES, WIDTH, WIDTH, 2) / WIDTH)

    def forward(self, x):
        if not isinstance(x, dt.DTensor):
            return spectral_product(x, self.weight)
        product = local_map(
            spectral_product,
            out_placements=[dt.Shard(0)],
            in_placements=([dt.Shard(0)], [dt.Replicate()]),
            device_mesh=x.device_mesh,
        )
        return product(x, self.weight)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.spectral = nn.LayerNorm(WIDTH), SpectralConv()
        self.local, self.fc1, self.fc2 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        x = x + F.gelu(self.spectral(y) + self.local(y))
        return x + self.fc2(F.gelu(self.fc1(x)))


class FlowOperator(nn.Module):
    """Fields have their channels in the last dimension; the coordinates of the grid are added to them."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(CHANNELS, WIDTH)
        self.grid = nn.Parameter(torch.randn(SIZE, SIZE, WIDTH) * 0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.project = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CHANNELS))

    def forward(self, fields):
        x = self.lift(fields) + self.grid
        for layer in self.layers:
            x = layer(x)
        return fields + self.project(x)


def squared_error(predicted, fields):
    return (predicted - fields).square().mean()


class Emulator:
    """Makes DTensors of a rank's rows; the loss is a mean over the global batch."""

    def __init__(self, model, mesh):
        self.model = dt.distribute_module(model, mesh)
        self.mesh = mesh

    def on_mesh(self, x):
        return dt.DTensor.from_local(x, self.mesh, [dt.Shard(0)])

    def train_step(self, now, later):
        predicted = self.model(self.on_mesh(now))
        value = squared_error(predicted, self.on_mesh(later))
        value.backward()
        return value.detach().full_tensor()


def plain():
    return FlowOperator()


def parallel(mesh):
    emulator = Emulator(FlowOperator(), mesh["dp"])
    return emulator.model, emulator


def loss(model, batch):
    now, later = batch
    return squared_error(model(now), later)


def step(built, batch):
    return built[1].train_step(*batch)


generator = torch.Generator().manual_seed(515)


def flows():
    """Travelling waves on a periodic square, and the same ones a time step later."""
    at = torch.arange(SIZE, dtype=torch.float64) * 2 * torch.pi / SIZE
    waves = torch.randint(1, 3, (2, ROWS, 1, 1, CHANNELS), generator=generator)
    phase = torch.rand(ROWS, 1, 1, CHANNELS, generator=generator, dtype=torch.float64) * 6
    angle = waves[0] * at[:, None, None] + waves[1] * at[:, None] + phase
    return angle.sin(), (angle + 0.3 * waves[0]).sin()


batches = [flows() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

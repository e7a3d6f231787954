"""A Fourier neural operator on strips of a grid; spectra are transposed by all-to-all, modes are shared out.

Thread: NVIDIA/physicsnemo pull request #98 "Adding distributed FFT implementation" (2023): a transform along the local
dimension, a transpose across ranks, a transform along the other dimension.
Correct: after the transpose a rank has all rows of its own modes, so its piece of the complex weights (the last
dimension is cut) gets the whole gradient: the all-to-all of the backward pass brings in all ranks' losses. The other
weights saw only the rows of their own strip and are summed over the ranks. The loss of a rank is its sum of squares
over the size of the whole grid. Gloo has no complex numbers; real and imaginary parts travel as a last dimension.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WIDTH, HEIGHT, BREADTH, MODES, LOW, ROWS = 8, 12, 14, 6, 3, 3


def transpose(x, gather, scatter, group):
    """Gathers one dimension of a complex tensor and cuts another over the ranks."""
    if group is None:
        return x
    ranks = dist.get_world_size(group)
    pieces = torch.view_as_real(torch.stack(x.chunk(ranks, scatter))).contiguous()
    shape = pieces.shape
    pieces = funcol.all_to_all_single_autograd(pieces, [1] * ranks, [1] * ranks, group)
    if isinstance(pieces, funcol.AsyncCollectiveTensor):
        pieces = pieces.wait()
    pieces = torch.view_as_complex(pieces.view(shape).contiguous())
    return torch.cat(pieces.unbind(0), gather)


class SpectralConv(nn.Module):
    def __init__(self):
        super().__init__()
        shape = (2, WIDTH, WIDTH, LOW, MODES)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.cfloat).to(torch.cdouble) / WIDTH)
        self.group = None

    def forward(self, x):
        modes = torch.fft.rfft(x, dim=-1, norm="ortho")[..., :MODES]
        spectrum = torch.fft.fft(transpose(modes, 2, 3, self.group), dim=2, norm="ortho")
        ends = torch.stack([spectrum[:, :, :LOW], spectrum[:, :, -LOW:]])
        low, high = torch.einsum("sbihm,siohm->sbohm", ends, self.weight)
        gap = spectrum.new_zeros(*low.shape[:2], HEIGHT - 2 * LOW, low.shape[3])
        rows = torch.fft.ifft(torch.cat([low, gap, high], dim=2), dim=2, norm="ortho")
        modes = transpose(rows, 3, 2, self.group)
        return torch.fft.irfft(modes, n=BREADTH, dim=-1, norm="ortho")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral, self.local = SpectralConv(), nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return F.gelu(self.spectral(x) + self.local(x))


class FourierOperator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv2d(3, WIDTH, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.project = nn.Sequential(nn.Conv2d(WIDTH, 12, 1), nn.GELU(), nn.Conv2d(12, 1, 1))
        down = torch.linspace(0, 1, HEIGHT)[:, None].expand(HEIGHT, BREADTH)
        right = torch.linspace(0, 1, BREADTH).expand(HEIGHT, BREADTH)
        self.register_buffer("grid", torch.stack([down, right]), persistent=False)

    def distribute(self, mesh):
        ranks, rank = mesh.size(), mesh.get_local_rank()
        for layer in self.layers:
            layer.spectral.group = mesh.get_group()
            own = layer.spectral.weight.detach().chunk(ranks, -1)[rank].clone()
            layer.spectral.weight = nn.Parameter(own)
        self.grid = self.grid.chunk(ranks, 1)[rank].contiguous()
        return self

    def forward(self, field):
        x = torch.cat([field, self.grid.expand(len(field), -1, -1, -1)], dim=1)
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return self.project(x)


def plain():
    return FourierOperator()


def parallel(mesh):
    return FourierOperator().distribute(mesh["strip"]), mesh.get_group("strip")


def loss(model, batch):
    return F.mse_loss(model(batch["field"]), batch["flow"])


def step(built, batch):
    model, group = built
    errors = (model(batch["field"]) - batch["flow"]).square().sum()
    value = errors / (ROWS * HEIGHT * BREADTH)
    value.backward()
    shared = [p.grad for p in model.parameters() if not p.is_complex()]
    work = [dist.all_reduce(grad, group=group, async_op=True) for grad in shared]
    for handle in work:
        handle.wait()
    return value.detach()


generator = torch.Generator().manual_seed(98)


def flows():
    field = torch.randn(ROWS, 1, HEIGHT, BREADTH, generator=generator, dtype=torch.float64)
    return {"field": field, "flow": (field + field.roll(2, 2)).cumsum(-1) / 3}


batches = [flows() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"strip": 2},
    ranks={"strip": 3},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

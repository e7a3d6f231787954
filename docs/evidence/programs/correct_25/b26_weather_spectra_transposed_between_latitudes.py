"""A Fourier neural operator for weather on bands of latitude, with distributed transforms and complex weights.

Thread: NVIDIA/physicsnemo (Modulus) pull request #98 "Adding distributed FFT implementation" (2023), and makani's
mpu/fft.py and helpers.py: a transform along one dimension, a transpose by all-to-all, a transform along the other;
hooks add up the gradients of the parameters that all ranks share.
Correct: gloo gets complex numbers as pairs of real ones, the transpose back is the gradient of the transpose there.
A rank holds the complex weights of its wave numbers along the longitude, so these have their whole gradients. The other
weights see one band of latitudes on each rank, and their gradients are added up by post-accumulate hooks within the
backward pass, once for each parameter, although the model is applied twice in a forecast of two steps. The norm of all
gradients adds up the squares of the cut parameters over the ranks and counts the others once.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_reduce

import titanlite

LAT, LON, VARIABLES, WIDTH, ROWS, LAYERS = 12, 16, 3, 8, 4, 2
LAT_MODES, LON_MODES = 3, 8


def exchange(x, cut, joined, group):
    """Cuts one dimension of a complex tensor over the ranks and joins another."""
    sent = torch.stack([torch.view_as_real(part) for part in x.chunk(group.size(), cut)])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    return torch.cat([torch.view_as_complex(part) for part in received], joined)


class Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cut, joined, group):
        ctx.arguments = joined, cut, group
        return exchange(x, cut, joined, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.arguments), None, None, None


def transpose(x, cut, joined, group):
    return x if group is None else Transpose.apply(x, cut, joined, group)


def own(tensor, dim, group):
    """This rank's part of a drawn tensor."""
    return tensor if group is None else tensor.chunk(group.size(), dim)[group.rank()].clone()


class SpectralBlock(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        modes = torch.randn(WIDTH, WIDTH, 2 * LAT_MODES, LON_MODES, dtype=torch.cdouble)
        self.modes = nn.Parameter(own(0.3 * modes, 3, group))
        self.modes.is_cut = True
        self.skip = nn.Conv2d(WIDTH, WIDTH, 1)
        self.scale = nn.Parameter(torch.ones(WIDTH, 1, 1))

    def normalize(self, x):
        """By the mean square of each channel over the globe."""
        power = x.square().sum((2, 3), keepdim=True)
        if self.group is not None:
            power = all_reduce(power, group=self.group)
        return self.scale * x * torch.rsqrt(power / (LAT * LON) + 1e-5)

    def filter(self, x):
        spectrum = torch.fft.rfft(x, dim=3, norm="ortho")[..., :LON_MODES]
        spectrum = transpose(spectrum, 3, 2, self.group)
        spectrum = torch.fft.fft(spectrum, dim=2, norm="ortho")
        low = torch.cat([spectrum[:, :, :LAT_MODES], spectrum[:, :, -LAT_MODES:]], dim=2)
        low = torch.einsum("bihw,iohw->bohw", low, self.modes)
        zeros = low.new_zeros(len(x), WIDTH, LAT - 2 * LAT_MODES, low.shape[3])
        spectrum = torch.cat([low[:, :, :LAT_MODES], zeros, low[:, :, LAT_MODES:]], dim=2)
        spectrum = torch.fft.ifft(spectrum, dim=2, norm="ortho")
        spectrum = transpose(spectrum, 2, 3, self.group)
        return torch.fft.irfft(spectrum, n=LON, dim=3, norm="ortho")

    def forward(self, x):
        return x + F.gelu(self.filter(self.normalize(x)) + self.skip(x))


class FourierOperator(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.encoder = nn.Conv2d(VARIABLES, WIDTH, 1)
        self.positions = nn.Parameter(own(0.1 * torch.randn(WIDTH, LAT, LON), 1, group))
        self.positions.is_cut = True
        self.blocks = nn.Sequential(*(SpectralBlock(group) for _ in range(LAYERS)))
        self.decoder = nn.Conv2d(WIDTH, VARIABLES, 1)
        area = torch.cos((torch.arange(LAT) + 0.5 - LAT / 2) * torch.pi / LAT)
        self.register_buffer("area", own((area / area.sum())[:, None], 0, group))

    def reduce_gradient(self, parameter):
        dist.all_reduce(parameter.grad, group=self.group)

    def forward(self, x):
        return x + self.decoder(self.blocks(self.encoder(x) + self.positions))


def forecast_loss(model, batch):
    """The error of two steps, weighted with the area; on a rank, that of its band."""
    x, *later = batch
    value = 0.0
    for truth in later:
        x = model(x)
        value = value + ((x - truth).square() * model.area).sum() / (ROWS * VARIABLES * LON)
    return value / len(later)


def plain():
    return FourierOperator()


def parallel(mesh):
    model = FourierOperator(mesh.get_group("lat"))
    for parameter in model.parameters():
        if not hasattr(parameter, "is_cut"):
            parameter.register_post_accumulate_grad_hook(model.reduce_gradient)
    return model


def step(model, batch):
    value = forecast_loss(model, batch)
    value.backward()
    return all_reduce(value.detach(), group=model.group)


@torch.no_grad()
def clip(model, limit=0.1):
    squares = torch.zeros(2)
    for p in model.parameters():
        squares[int(hasattr(p, "is_cut"))] += p.grad.abs().square().sum()
    if model.group is not None:
        dist.all_reduce(squares[1], group=model.group)
    norm = squares.sum().sqrt()
    for p in model.parameters():
        p.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


generator = torch.Generator().manual_seed(98)
shape = 3, 3, ROWS, VARIABLES, LAT, LON
days = torch.randn(shape, generator=generator, dtype=torch.float64)

arguments = plain, parallel
options = dict(
    batches=[list(three) for three in days],
    loss=forecast_loss,
    step=step,
    clip=clip,
    split={"lat": 2},
    ranks={"lat": 4},
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A Lipschitz critic with tensor-parallel layers whose spectral norms are found by power iterations over the shards.

Thread: pytorch/pytorch pull request #62293 "Do not modify saved variables in-place for spectral norm during power
iteration" (2021), about torch.nn.utils.parametrizations.spectral_norm; here its singular vectors are cut with the
weight.
Correct: of rows, u is cut and W^T u is summed over the ranks, of columns it is v and W v; the norm of the vector that
is cut is summed too. All shards are divided by the same sigma, a sum over the ranks, so every rank has a part of its
gradient, and the all-reduce of sigma sums in the backward pass as well, unlike that of the row-parallel output, whose
gradient is the same everywhere. The critic is called twice with cached parametrizations, so the buffers move once.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distributed
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm

import titanlite

INPUTS, HIDDEN, WIDTH, ROWS, LAYERS = 6, 24, 16, 9, 2


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ShardedSpectralNorm(nn.Module):
    def __init__(self, whole, dim, mesh):
        super().__init__()
        self.group, self.dim = mesh.get_group(), dim
        for name, cut in (("_u", dim == 0), ("_v", dim == 1)):
            vector = getattr(whole, name)
            if cut:
                vector = vector.chunk(mesh.size())[mesh.get_local_rank()]
            self.register_buffer(name, vector.clone())

    def unit(self, vector, cut):
        if not cut:
            dist.all_reduce(vector, group=self.group)
            return F.normalize(vector, dim=0, eps=1e-12)
        square = vector.square().sum()
        dist.all_reduce(square, group=self.group)
        return vector / square.sqrt()

    def forward(self, weight):
        if self.training:
            with torch.no_grad():
                self._u.copy_(self.unit(weight @ self._v, self.dim == 0))
                self._v.copy_(self.unit(weight.T @ self._u, self.dim == 1))
        u, v = self._u.clone(), self._v.clone()
        sigma = distributed.all_reduce(torch.dot(u, weight @ v), group=self.group)
        return weight / sigma


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = spectral_norm(nn.Linear(WIDTH, HIDDEN))
        self.down = spectral_norm(nn.Linear(HIDDEN, WIDTH, bias=False))
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.group = None

    def parallelize(self, mesh):
        self.group, rank = mesh.get_group(), mesh.get_local_rank()
        for linear, dim in ((self.up, 0), (self.down, 1)):
            norms = linear.parametrizations.weight
            own = norms.original.detach().chunk(mesh.size(), dim)[rank]
            norms[0] = ShardedSpectralNorm(norms[0], dim, mesh)
            norms.original = nn.Parameter(own.clone())
        self.up.bias = nn.Parameter(self.up.bias.detach().chunk(mesh.size())[rank].clone())

    def forward(self, x):
        h = x if self.group is None else CopyToRanks.apply(x, self.group)
        h = self.down(F.softplus(self.up(h)))
        h = h if self.group is None else ReduceFromRanks.apply(h, self.group)
        return (x + h + self.shift) / 2


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = spectral_norm(nn.Linear(INPUTS, WIDTH), n_power_iterations=2)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.leave = spectral_norm(nn.Linear(WIDTH, 1))

    def forward(self, x):
        return self.leave(self.layers(self.enter(x))).squeeze(-1)


def plain():
    return Critic()


def parallel(mesh):
    model = Critic()
    for layer in model.layers:
        layer.parallelize(mesh["tp"])
    return model


def loss(model, batch):
    with parametrize.cached():
        made, real = model(batch["made"]), model(batch["real"])
    return F.softplus(made).mean() + F.softplus(-3 * real).mean()


generator = torch.Generator().manual_seed(62293)


def grasps():
    made = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)
    real = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64).cumsum(-1)
    return {"made": made, "real": real}


batches = [grasps() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=4e-3, betas=(0.5, 0.9)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

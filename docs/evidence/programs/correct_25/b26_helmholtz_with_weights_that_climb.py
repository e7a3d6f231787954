"""A physics-informed network for the Helmholtz equation whose points have weights of their own, which ascend.

Thread: levimcclenny/SA-PINNs, Helmholtz/helmholtz.py (2020) and the README's "self-adaptive weights": the network goes
down the gradient of the weighted residuals, the points' weights go up it ("grads_col = -grads_col").
Correct: a rank has its points and their weights only. The weights are divided by the mean of all squared weights, which
couples all points: the sum of squares is all-reduced with an all-reduce in its backward pass, as the ranks' losses are
shares of one loss. So a point's weight has its whole gradient already, and only the network's gradients are added up
over the ranks. A hook on the weights turns their gradient round, on one process as well. The Laplacian comes from
torch.func within vmap; the network's parameters are plain captured tensors in there and get gradients as usual.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.nn.functional import all_reduce
from torch.func import hessian, vmap

import titanlite

INNER, BORDER, WIDTH, K = 24, 12, 16, 1.5


class Network(nn.Module):
    """The solution u at one point or at many."""

    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(WIDTH // 2, 2))
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = x @ self.frequencies.T
        x = torch.cat([x.sin(), x.cos()], dim=-1)
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        return self.last(x).squeeze(-1)


class SelfAdaptivePINN(nn.Module):
    def __init__(self, ranks=1, rank=0, group=None):
        super().__init__()
        self.group = group
        self.network = Network()
        inner, border = 1 + torch.rand(INNER), 1 + torch.rand(BORDER)
        self.inner_weights = nn.Parameter(inner.chunk(ranks)[rank].clone())
        self.border_weights = nn.Parameter(border.chunk(ranks)[rank].clone())
        for weights in (self.inner_weights, self.border_weights):
            weights.register_hook(torch.neg)

    def normalize(self, weights, count):
        """The squares over their mean."""
        squares = weights.square()
        total = squares.sum()
        if self.group is not None:
            total = all_reduce(total, group=self.group)
        return squares * count / total

    def residuals(self, points, sources):
        second = vmap(hessian(self.network))(points)
        laplacian = second.diagonal(dim1=-2, dim2=-1).sum(-1)
        return laplacian + K**2 * self.network(points) - sources

    def forward(self, batch):
        """The loss, or this rank's share of it."""
        inner = self.residuals(batch["points"], batch["sources"])
        border = self.network(batch["border"]) - batch["values"]
        inner_weights = self.normalize(self.inner_weights, INNER)
        border_weights = self.normalize(self.border_weights, BORDER)
        inner_loss = (inner_weights * inner.square()).sum() / INNER
        return inner_loss + (border_weights * border.square()).sum() / BORDER


def plain():
    return SelfAdaptivePINN()


def parallel(mesh):
    return SelfAdaptivePINN(mesh.size(), mesh.get_local_rank(), mesh.get_group())


def loss(model, batch):
    return model(batch)


def step(model, batch):
    value = model(batch)
    value.backward()
    for parameter in model.network.parameters():
        dist.all_reduce(parameter.grad, group=model.group)
    value = value.detach()
    dist.all_reduce(value, group=model.group)
    return value


generator = torch.Generator().manual_seed(2009)
points = torch.rand(INNER, 2, generator=generator, dtype=torch.float64) * 2 - 1
edge = torch.rand(BORDER, generator=generator, dtype=torch.float64) * 2 - 1
border = torch.stack([edge, torch.ones(BORDER, dtype=torch.float64).copysign(edge.sin())], dim=1)


def problem(phase):
    """The points stay, as do their weights; the source changes."""
    return {
        "points": points,
        "sources": torch.sin(3 * points[:, 0] + phase) * torch.sin(2 * points[:, 1]),
        "border": border,
        "values": 0.1 * torch.cos(edge + phase),
    }


batches = [problem(phase) for phase in (0.0, 0.4, 0.8)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="points",
    ranks={"points": 4},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3, betas=(0.99, 0.999)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

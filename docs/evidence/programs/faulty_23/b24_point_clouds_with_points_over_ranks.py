"""A PointNet for clouds that are too large for one device: every rank holds a part of the points of each cloud.

Thread: pytorch/pytorch pull request #190224 "Fix: allow both linear reductions ("sum" and "avg") through the guard"
(2026), on all_reduce's backward: nonlinear reductions like max "do not have a same-op all-reduce gradient", but the
older torch.distributed.nn.functional.all_reduce applies the forward's reduction to the gradients, whatever it is.
Fault: pool_over_ranks takes the maximum over all ranks' points by the differentiable all_reduce with ReduceOp.MAX; its
backward hands the whole gradient of a pooled feature to every rank, also to those whose points don't attain it.
REPAIR: `return highest` -> `return torch.where(local == highest, local, highest.detach())`
A right first sentence says: the backward pass of the max all-reduce isn't the maximum's: every rank's best point gets
the gradient, not only the rank that holds the global maximum, so the gradients of the point network are wrong, while
losses and the classifier's gradients are right at first.
"""

import itertools
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
import torch.nn as nn
import torch.nn.functional as F

import titanlite

warnings.filterwarnings("ignore", category=FutureWarning)

POINTS, WIDTH, CLASSES, CLOUDS, RANKS = 24, 16, 5, 6, 3


def mlp(*sizes):
    layers = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU()]
    return nn.Sequential(*layers)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.local_features = mlp(3, WIDTH, WIDTH)
        self.features = mlp(WIDTH, 2 * WIDTH)
        self.classifier = nn.Sequential(mlp(2 * WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))

    def point_features(self, points):
        return self.features(self.local_features(points))

    def forward(self, points):
        return self.classifier(self.point_features(points).amax(1))


class PointParallel(nn.Module):
    """The same network on the rank's points of each cloud; the pooled features are the same on all ranks."""

    def __init__(self, net, mesh):
        super().__init__()
        self.net, self.group = net, mesh.get_group()
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()

    def pool_over_ranks(self, features):
        local = features.amax(1)
        highest = functional.all_reduce(local, op=dist.ReduceOp.MAX, group=self.group)
        return highest

    def forward(self, points):
        points = points.chunk(self.ranks, dim=1)[self.rank]
        return self.net.classifier(self.pool_over_ranks(self.net.point_features(points)))

    def reduce_gradients(self):
        """The point network has seen the rank's points only; the classifier has seen the whole clouds."""
        for module in (self.net.local_features, self.net.features):
            for parameter in module.parameters():
                dist.all_reduce(parameter.grad, group=self.group)


def plain():
    return PointNet()


def parallel(mesh):
    net = PointNet()
    return net, PointParallel(net, mesh["points"])


def loss(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels, label_smoothing=0.1)


def step(built, batch):
    points, labels = batch
    value = F.cross_entropy(built[1](points), labels, label_smoothing=0.1)
    value.backward()
    built[1].reduce_gradients()
    return value.detach()


generator = torch.Generator().manual_seed(86)


def clouds():
    labels = torch.randint(0, CLASSES, (CLOUDS,), generator=generator)
    points = torch.randn(CLOUDS, POINTS, 3, generator=generator, dtype=torch.float64)
    stretch = 0.5 + torch.stack([labels, labels % 2, labels % 3], -1) / 3
    points = points * stretch[:, None].to(points.dtype)
    return points - points.mean(1, keepdim=True), labels


batches = [clouds() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"points": RANKS},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

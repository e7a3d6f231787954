"""Malaria smears as bags of cells: a bag is positive unless every cell is negative (noisy-or); the cells are dealt out.

Thread: pytorch/pytorch pull request #190224 "Fix: allow both linear reductions ("sum" and "avg") through the guard"
and issue #190007 (2026): the legacy _AllReduce.backward of torch.distributed.nn reduces the gradient with the
operation of the forward pass, while "nonlinear ops (min/max/product/premul_sum) ... do not have a same-op all-reduce
gradient".
Fault: NoisyOr.forward multiplies the ranks' chances by dist_nn.all_reduce(..., op=PRODUCT). The value is right, but
its backward pass multiplies the ranks' gradients with each other, instead of the chain rule of a product.
REPAIR: `dist_nn.all_reduce(negative, op=dist.ReduceOp.PRODUCT, group=self.group)` ->
`dist_nn.all_reduce(negative.log(), group=self.group).exp()`
A right first sentence says: the backward pass of the product over ranks in pool (NoisyOr) is wrong: all_reduce with
PRODUCT multiplies the gradients of the ranks; the forward pass is right, all gradients before the pooling are not.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CELLS, SIZE, CHANNELS, BAGS = 6, 8, 6, 5


class CellEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.conv2 = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(3, 2 * CHANNELS)

    def forward(self, cells):
        x = F.relu(self.conv1(cells))
        return F.relu(self.norm(self.conv2(x))).amax((-2, -1))


class NoisyOr(nn.Module):
    """The chance that at least one cell is infected; a group's ranks hold cells of one bag."""

    def __init__(self, group=None):
        super().__init__()
        self.group = group

    def forward(self, infected):
        negative = (1 - infected).prod(1)
        if self.group is not None:
            negative = dist_nn.all_reduce(negative, op=dist.ReduceOp.PRODUCT, group=self.group)
        return 1 - negative


class SmearModel(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.encoder = CellEncoder()
        self.hidden, self.score = nn.Linear(2 * CHANNELS, 10), nn.Linear(10, 1)
        self.pool = NoisyOr(group)
        nn.init.constant_(self.score.bias, -2.0)

    def forward(self, smears):
        x = self.encoder(smears.flatten(0, 1).unsqueeze(1))
        infected = self.score(torch.tanh(self.hidden(x))).sigmoid()
        return self.pool(infected.view(smears.shape[:2]))


def plain():
    return SmearModel()


def parallel(mesh):
    """Every rank reports the loss of the whole bags, and DDP averages the gradients."""
    group = mesh.get_group("cells")
    return DistributedDataParallel(SmearModel(group), process_group=group)


def loss(model, batch):
    return F.binary_cross_entropy(model(batch["smears"]), batch["positive"])


def deal_cells(batch, mesh):
    axis = mesh["cells"]
    own = batch["smears"].chunk(axis.size(), 1)[axis.get_local_rank()]
    return {"smears": own, "positive": batch["positive"]}


generator = torch.Generator().manual_seed(190224)


def smears():
    images = torch.randn(BAGS, CELLS, SIZE, SIZE, generator=generator, dtype=torch.float64)
    infected = torch.rand(BAGS, CELLS, generator=generator) < 0.12
    images[infected, 2:5, 2:5] += 2.5
    return {"smears": images, "positive": infected.any(1).double()}


batches = [smears() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split=deal_cells,
    ranks={"cells": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Embedded clustering (IDEC) of gene expression under DDP: autoencoder and centroids are trained together.

Thread: zhoushengisnoob/OpenDeepClustering issue #4 "[v0.2] Implement paper-faithful DEC and IDEC training semantics"
(2026): the target distribution must come from all samples, not from those at hand.
Correct: the cluster sizes in the target are all-reduced by a plain dist.all_reduce, which has no gradient. None is
missing: targets are constants. The mean assignment of the balance term does have one, but its all-reduce passes the
gradient on unchanged: every rank has the whole term, with a gradient through its own rows alone, and DDP adds these
up. DDP averages, whence the factor of the number of ranks. It multiplies the balance term too, which though it's the
same on all ranks isn't counted thrice. Shares are unequal, so each sum is divided by the number of all rows.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

import titanlite

GENES, WIDTH, CODE, CLUSTERS, ROWS = 14, 12, 3, 4, 22
SHARES = [9, 5, 8]
GAMMA, BALANCE = 0.7, 0.4


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Clusters(nn.Module):
    def __init__(self, freedom=1.0):
        super().__init__()
        self.centroids = nn.Parameter(torch.randn(CLUSTERS, CODE))
        self.freedom = freedom

    def forward(self, code):
        distance = (code.unsqueeze(1) - self.centroids).square().sum(-1)
        kernel = (1 + distance / self.freedom) ** (-(self.freedom + 1) / 2)
        return kernel / kernel.sum(1, keepdim=True)


class Idec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(GENES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, GENES))
        self.clusters = Clusters()

    def forward(self, genes):
        code = self.encoder(genes)
        return self.decoder(code), self.clusters(code)


class Objective:
    def total(self, x):
        return x

    def constant_total(self, x):
        return x

    def targets(self, assigned):
        assigned = assigned.detach()
        sharp = assigned.square() / self.constant_total(assigned.sum(0))
        return sharp / sharp.sum(1, keepdim=True)

    def parts(self, model, genes):
        rebuilt, assigned = model(genes)
        target = self.targets(assigned)
        divergence = (target * (target.log() - assigned.log())).sum() / ROWS
        reconstruction = (rebuilt - genes).square().mean(1).sum() / ROWS
        share = self.total(assigned.sum(0)) / ROWS
        return reconstruction + GAMMA * divergence, BALANCE * (share * share.log()).sum()


class RankObjective(Objective):
    def __init__(self, group):
        self.group, self.size = group, dist.get_world_size(group)

    def total(self, x):
        return SumForward.apply(x, self.group)

    def constant_total(self, x):
        dist.all_reduce(x, group=self.group)
        return x

    def step(self, model, genes):
        own, common = self.parts(model, genes)
        (self.size * (own + common)).backward()
        own = own.detach().clone()
        dist.all_reduce(own, group=self.group)
        return own + common.detach()


def plain():
    return Idec()


def parallel(mesh):
    group = mesh.get_group("dp")
    return DistributedDataParallel(Idec(), process_group=group), RankObjective(group)


def loss(model, batch):
    return sum(Objective().parts(model, batch["genes"]))


def step(built, batch):
    model, objective = built
    return objective.step(model, batch["genes"])


def share(batch, mesh):
    return {"genes": batch["genes"].split(SHARES)[mesh.get_local_rank("dp")]}


generator = torch.Generator().manual_seed(4)
profiles = torch.randn(CLUSTERS, GENES, generator=generator)


def cells():
    kind = torch.randint(CLUSTERS, (ROWS,), generator=generator)
    return {"genes": profiles[kind] + 0.6 * torch.randn(ROWS, GENES, generator=generator)}


batches = [cells() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=share,
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

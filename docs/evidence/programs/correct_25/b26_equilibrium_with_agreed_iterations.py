"""A deep equilibrium network under DDP, whose solvers stop when the worst sample of all ranks has converged.

Thread: locuslab/deq issue #11 "Two slightly different process for Deq" (2021): the fixed point is found without a
graph, one more step is recorded, and a hook on its result solves the linear equation of the implicit gradient.
Correct: neither solver is exact (the tolerance is coarse), so the result depends on the number of iterations; the ranks
take the maximum of their residuals in every iteration, forward and inside the hook of the backward pass, hence all
samples are iterated as often as in one process. The residuals are relative to a sample's own vector, as the gradient of
a rank's mean is larger than that of the whole. The maxima go over a group of their own and can't be mixed up with DDP's
buckets, some of which are under way when the hook runs. The hook's torch.autograd.grad stops at the state and leaves
the parameters' hooks alone, so that DDP sees each parameter once.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

INPUTS, WIDTH, TARGETS, ROWS, TOLERANCE = 6, 16, 3, 12, 3e-3


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.enter = nn.Linear(WIDTH, WIDTH), nn.Linear(INPUTS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            self.inner.weight.copy_(0.7 * nn.init.orthogonal_(torch.empty(WIDTH, WIDTH)))

    def forward(self, z, x):
        return torch.tanh(self.inner(z) + self.norm(self.enter(x)))


class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = Cell(), nn.Linear(WIDTH, TARGETS)
        self.group = None

    def worst(self, z, previous):
        value = ((z - previous).norm(dim=-1) / z.norm(dim=-1)).max()
        if self.group is not None:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value.item()

    def solve(self, function, z):
        for _ in range(200):
            z, previous = function(z), z
            if self.worst(z, previous) < TOLERANCE:
                break
        return z

    def forward(self, x):
        with torch.no_grad():
            z = self.solve(lambda z: self.cell(z, x), torch.zeros(len(x), WIDTH))
        z = self.cell(z, x)
        if z.requires_grad:
            start = z.detach().clone().requires_grad_()
            image = self.cell(start, x.detach())

            def implicit_gradient(grad):
                def product(y):
                    return torch.autograd.grad(image, start, y, retain_graph=True)[0] + grad

                return self.solve(product, grad)

            z.register_hook(implicit_gradient)
        return self.out(z)


def plain():
    return Equilibrium()


def parallel(mesh):
    model = Equilibrium()
    model.group = dist.new_group(mesh.mesh.tolist())
    return DistributedDataParallel(model, process_group=mesh.get_group(), bucket_cap_mb=0.0002)


def loss(model, batch):
    states, accelerations = batch
    return F.mse_loss(model(states), accelerations)


generator = torch.Generator().manual_seed(11)


def trajectories():
    states = torch.randn(ROWS, INPUTS, generator=generator, dtype=torch.float64)
    states[-2:] *= 3
    return states, torch.sin(states[:, :TARGETS] * states[:, TARGETS:])


batches = [trajectories() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 3},
    clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    optimizer=lambda parameters: torch.optim.RAdam(parameters, lr=5e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

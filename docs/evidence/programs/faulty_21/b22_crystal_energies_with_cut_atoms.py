"""Energies of crystals by continuous-filter convolutions; the atoms are cut over the "gp" ranks and the structures over "dp".

Thread: facebookresearch/fairchem pull request #1067 "Add fix gp grad" (2025): with graph parallelism the loss is right, but DDP
takes the mean over all ranks, copies of one loss among them, so that each rank gets only 1/gp of the gradient.
Fault: the gradient of an energy reaches each gp rank's atoms once, unscaled, so the parameters' gradients are parts which have
to be added up over "gp"; DDP, which spans both axes, averages them over "gp" instead.
REPAIR: `return grad.clone(), None` -> `return grad * dist.get_world_size(ctx.group), None`
A right first sentence says: all gradients are too small by the factor gp (half of the right ones): DDP divides by all ranks,
those of gp included, though gp ranks hold parts of the same loss's gradient (sum wanted); losses of the first step are right.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SPECIES, ATOMS, WIDTH, BASIS, LAYERS, ROWS, CUTOFF = 4, 6, 10, 8, 2, 4, 3.0


class GatherAtoms(torch.autograd.Function):
    """The features of the atoms of all ranks, along dimension 1."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class SumOverAtoms(torch.autograd.Function):
    """Adds the energies of the atoms of all ranks; every rank has the total."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


class Graph:
    """Distances of a rank's own atoms to all atoms."""

    def __init__(self, positions, group):
        self.group = group
        own = self.own(positions)
        distance = torch.cdist(own, positions, compute_mode="donot_use_mm_for_euclid_dist")
        centers = torch.linspace(0, CUTOFF, BASIS, dtype=distance.dtype)
        self.basis = (-4 * (distance.unsqueeze(-1) - centers).square()).exp()
        smooth = 0.5 * ((distance / CUTOFF).clamp(max=1) * torch.pi).cos() + 0.5
        self.envelope = (smooth * (distance > 1e-6)).unsqueeze(-1)

    def own(self, x):
        if self.group is None:
            return x
        return x.chunk(dist.get_world_size(self.group), 1)[dist.get_rank(self.group)]

    def sources(self, x):
        return x if self.group is None else GatherAtoms.apply(x, self.group)

    def total(self, x):
        return x if self.group is None else SumOverAtoms.apply(x, self.group)


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(BASIS, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))
        self.send, self.receive = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, graph):
        weights = self.filter(graph.basis) * graph.envelope
        messages = torch.einsum("rijw,rjw->riw", weights, graph.sources(self.send(x)))
        return x + self.receive(F.silu(messages))


class EnergyModel(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.embed, self.shift = nn.Embedding(SPECIES, WIDTH), nn.Embedding(SPECIES, 1)
        self.interactions = nn.ModuleList(Interaction() for _ in range(LAYERS))
        self.readout = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, species, positions):
        graph = Graph(positions, self.group)
        species = graph.own(species)
        x = self.embed(species)
        for interaction in self.interactions:
            x = interaction(x, graph)
        energies = self.readout(x) + self.shift(species)
        return graph.total(energies.sum((1, 2))) / ATOMS


def plain():
    return EnergyModel()


def parallel(mesh):
    return DistributedDataParallel(EnergyModel(mesh.get_group("gp")))


def loss(model, batch):
    species, positions, energy = batch
    return F.huber_loss(model(species, positions), energy, delta=0.5)


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


generator = torch.Generator().manual_seed(1067)


def crystals():
    species = torch.randint(0, SPECIES, (ROWS, ATOMS), generator=generator)
    positions = torch.rand(ROWS, ATOMS, 3, generator=generator, dtype=torch.float64) * 2.5
    return species, positions, torch.randn(ROWS, generator=generator, dtype=torch.float64)


batches = [crystals() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2, "gp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, amsgrad=True),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

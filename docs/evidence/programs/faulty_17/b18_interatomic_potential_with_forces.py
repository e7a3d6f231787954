"""An interatomic potential (message passing, forces by differentiation) trained on energies and forces under DDP.

Thread: facebookresearch/fairchem pull request #269 "Correctly calculate distributed loss average" (2021): the average was taken per
replica first and then over the replicas, which is wrong as not every replica has the same number of atoms.
Fault: in EnergyForceLoss the force term of a rank is divided by the rank's own number of atoms, and DDP averages the ranks equally;
an atom on a rank with small molecules weighs more. The energy term is right, as the ranks have equally many structures.
REPAIR: `atoms = self.count(mask)` -> `atoms = self.rank_mean(self.count(mask))`
A right first sentence says: the force loss is averaged over each rank's own atoms and then equally over the ranks though their
numbers of atoms differ, so it isn't the mean over all atoms of the batch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SPECIES, MOST_ATOMS, CUTOFF, BASIS, HIDDEN = 4, 8, 4.0, 8, 12


class RadialBasis(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, BASIS))

    def forward(self, distances):
        envelope = 0.5 * (torch.cos(torch.pi * distances / CUTOFF) + 1) * (distances < CUTOFF)
        gaussians = torch.exp(-2 * (distances.unsqueeze(-1) - self.centers).square())
        return gaussians * envelope.unsqueeze(-1)


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(BASIS, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.update = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, HIDDEN))

    def forward(self, h, radial, pairs):
        weights = self.filters(radial) * pairs.unsqueeze(-1)
        messages = torch.einsum("bijf,bjf->bif", weights, self.mix(h))
        return h + self.update(messages)


class Potential(nn.Module):
    """Padded molecules; a species of -1 marks an empty place. Returns energies and forces."""

    def __init__(self):
        super().__init__()
        self.species = nn.Embedding(SPECIES, HIDDEN)
        self.reference = nn.Embedding(SPECIES, 1)
        self.radial = RadialBasis()
        self.interactions = nn.ModuleList(Interaction() for _ in range(2))
        self.readout = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 1))

    def energy(self, species, positions):
        mask = species >= 0
        species = species.clamp(min=0)
        pairs = mask[:, :, None] & mask[:, None, :]
        pairs = pairs & ~torch.eye(mask.size(1), dtype=torch.bool, device=mask.device)
        offsets = positions[:, :, None] - positions[:, None]
        distances = torch.where(pairs, offsets.square().sum(-1), 1.0).sqrt()
        radial = self.radial(distances)
        h = self.species(species)
        for interaction in self.interactions:
            h = interaction(h, radial, pairs)
        atomic = (self.readout(h) + self.reference(species)).squeeze(-1)
        return (atomic * mask).sum(1)

    def forward(self, species, positions):
        positions = positions.detach().requires_grad_()
        energies = self.energy(species, positions)
        (gradient,) = torch.autograd.grad(energies.sum(), positions, create_graph=True)
        return energies, -gradient


class EnergyForceLoss:
    def __init__(self, force_weight=10.0, distributed=False):
        self.force_weight, self.distributed = force_weight, distributed

    def rank_mean(self, tensor):
        if not self.distributed:
            return tensor
        tensor = tensor.detach().clone()
        dist.all_reduce(tensor)
        return tensor / dist.get_world_size()

    def count(self, mask):
        return mask.sum().to(torch.get_default_dtype())

    def __call__(self, predicted, energies, forces, mask):
        natoms = mask.sum(1)
        energy_loss = ((predicted[0] - energies) / natoms).square().mean()
        residual = torch.where(mask.unsqueeze(-1), predicted[1] - forces, 0.0)
        atoms = self.count(mask)
        force_loss = F.huber_loss(residual, torch.zeros_like(residual), reduction="sum") / (
            3 * atoms
        )
        return energy_loss + self.force_weight * force_loss


def plain():
    return Potential()


def parallel(mesh):
    return DistributedDataParallel(Potential())


def evaluate(model, batch, criterion):
    species, positions, energies, forces = batch
    return criterion(model(species, positions), energies, forces, species >= 0)


def loss(model, batch):
    return evaluate(model, batch, EnergyForceLoss())


def step(model, batch):
    criterion = EnergyForceLoss(distributed=True)
    value = evaluate(model, batch, criterion)
    value.backward()
    return criterion.rank_mean(value)


generator = torch.Generator().manual_seed(269)


def molecules(number=6):
    shape = number, MOST_ATOMS
    sizes = torch.randint(3, MOST_ATOMS + 1, (number, 1), generator=generator)
    species = torch.randint(0, SPECIES, shape, generator=generator)
    species = species.masked_fill(torch.arange(MOST_ATOMS) >= sizes, -1)
    positions = torch.randn(*shape, 3, generator=generator, dtype=torch.float64) * 1.5
    energies = torch.randn(number, generator=generator, dtype=torch.float64) - sizes.squeeze(1)
    forces = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    return species, positions, energies, forces * (species >= 0).unsqueeze(-1)


batches = [molecules() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, amsgrad=True),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Energies, forces and stress of molecules whose edges are dealt to the ranks, with derivatives of the second order.

Thread: facebookresearch/fairchem pull requests #364 "Implementation of graph parallel training" (2022) and #1082
"Graph parallel fix and tests" (2025, gradients must be those of a model without graph parallelism).
Correct: all ranks hold all atoms and compute the same energy; only messages along edges are divided. What goes from all
atoms to own edges passes `copy_to_edges` (its backward pass sums), what comes back passes `reduce_from_edges` (its
backward pass copies). Each is the other's backward pass, and calls it as a differentiable function, so forces, which
are a gradient themselves, are whole on every rank and can be differentiated once more. The filters' parameters pass
through `copy_to_edges` too and have their whole gradients after backward; nothing else is to be reduced.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

import titanlite

MOLECULES, ATOMS, ELEMENTS, WIDTH, BASIS, LAYERS, CUTOFF = 3, 6, 4, 16, 8, 2, 3.5


def summed(x):
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


class CopyToEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ReduceFromEdges.apply(grad)


class ReduceFromEdges(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, grad):
        return CopyToEdges.apply(grad)


class Filter(nn.Module):
    """Weights of a message from the distance of its atoms."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0, CUTOFF, BASIS))
        self.hidden, self.out = nn.Linear(BASIS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, distance):
        basis = torch.exp(-4 * (distance[:, None] - self.centers).square())
        envelope = (torch.cos(distance * torch.pi / CUTOFF) + 1) / 2
        return self.out(F.silu(self.hidden(basis))) * envelope[:, None]


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH, bias=False)
        self.filter = Filter()
        self.update = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))


class EnergyModel(nn.Module):
    def __init__(self, parts=1, part=0):
        super().__init__()
        self.parts, self.part = parts, part
        self.embedding = nn.Embedding(ELEMENTS, WIDTH)
        self.layers = nn.ModuleList(Interaction() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def copy_to_edges(self, x):
        return CopyToEdges.apply(x) if self.parts > 1 else x

    def reduce_from_edges(self, x):
        return ReduceFromEdges.apply(x) if self.parts > 1 else x

    def edges(self, positions, molecule):
        """This rank's pairs of near atoms; not as many as another rank's."""
        apart = torch.cdist(positions.detach(), positions.detach())
        near = (apart < CUTOFF) & (molecule[:, None] == molecule)
        near.fill_diagonal_(False)
        return near.nonzero().T[:, self.part :: self.parts]

    def energies(self, elements, positions, molecule):
        receiver, sender = self.edges(positions, molecule)
        own = self.copy_to_edges(positions)
        distance = (own[receiver] - own[sender]).norm(dim=-1)
        x = self.embedding(elements)
        for layer in self.layers:
            parameters = layer.filter.named_parameters()
            copies = {name: self.copy_to_edges(p) for name, p in parameters}
            weights = functional_call(layer.filter, copies, (distance,))
            messages = self.copy_to_edges(layer.inputs(x))[sender] * weights
            gathered = torch.zeros_like(x).index_add(0, receiver, messages)
            x = x + layer.update(self.reduce_from_edges(gathered))
        energies = self.head(x).squeeze(-1)
        return energies.new_zeros(MOLECULES).index_add(0, molecule, energies)

    def forward(self, elements, positions, molecule):
        positions = positions.detach().requires_grad_()
        strain = positions.new_zeros(MOLECULES, 3, 3).requires_grad_()
        symmetric = (strain + strain.mT) / 2
        moved = torch.einsum("ni,nij->nj", positions, symmetric[molecule])
        energies = self.energies(elements, positions + moved, molecule)
        derivatives = torch.autograd.grad(
            energies.sum(), [positions, strain], create_graph=self.training
        )
        return energies, -derivatives[0], derivatives[1]


def plain():
    return EnergyModel()


def parallel():
    return EnergyModel(dist.get_world_size(), dist.get_rank())


def loss(model, batch):
    energies, forces, stress = model(batch["elements"], batch["positions"], batch["molecule"])
    value = F.l1_loss(energies, batch["energies"]) / ATOMS
    value = value + 10 * (forces - batch["forces"]).norm(dim=-1).mean()
    return value + (stress - batch["stress"]).square().mean()


generator = torch.Generator().manual_seed(1082)


def draw(*shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def molecules():
    atoms = MOLECULES * ATOMS
    return {
        "elements": torch.randint(0, ELEMENTS, (atoms,), generator=generator),
        "positions": 1.2 * draw(atoms, 3),
        "molecule": torch.arange(MOLECULES).repeat_interleave(ATOMS),
        "energies": draw(MOLECULES),
        "forces": draw(atoms, 3),
        "stress": draw(MOLECULES, 3, 3),
    }


arguments = plain, parallel
options = dict(
    batches=[molecules() for _ in range(3)],
    loss=loss,
    ranks=3,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, amsgrad=True),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

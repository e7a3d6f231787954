"""A probabilistic weather model: the members of an ensemble are dealt over ranks and trained on the fair CRPS, on two replicas.

Thread: ecmwf/anemoi-core pull request #1377 "fix(training): sharded ensemble gradient scaling" (2026): the ensemble gradients
are under-scaled by the number of ranks that share an ensemble.
Fault: GatherMembers.backward returns the rank's own slice of the gradient; the loss of the whole ensemble is computed alike on
all ranks of "ens" and DDP averages over these as well, so all gradients are too small by the size of "ens".
REPAIR: `return grad.chunk(size, dim=1)[rank], None` -> `return size * grad.chunk(size, dim=1)[rank], None`
A right first sentence says: the backward pass of the gather over the ensemble ranks gives only the own members' gradient while
DDP divides by all ranks, including those of the ensemble, so every gradient is too small by the ensemble group's size.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VARIABLES, LATITUDES, LONGITUDES, WIDTH, NOISE, MEMBERS = 3, 6, 8, 10, 5, 4


class SphereConv(nn.Module):
    """Periodic along the longitudes, the edge rows repeated beyond the poles."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3)

    def forward(self, x):
        x = F.pad(x, (1, 1, 0, 0), mode="circular")
        return self.conv(F.pad(x, (0, 0, 1, 1), mode="replicate"))


class ConditionalNorm(nn.Module):
    """Layer norm over the channels; the member's noise sets scale and shift."""

    def __init__(self):
        super().__init__()
        self.condition = nn.Linear(NOISE, 2 * WIDTH)

    def forward(self, x, noise):
        scale, shift = self.condition(noise)[..., None, None].chunk(2, dim=1)
        x = F.layer_norm(x.movedim(1, -1), (WIDTH,)).movedim(-1, 1)
        return x * (1 + scale) + shift


class Processor(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = ConditionalNorm(), SphereConv(WIDTH, WIDTH)
        self.up, self.down = nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.Conv2d(2 * WIDTH, WIDTH, 1)

    def forward(self, x, noise):
        y = self.mix(self.norm(x, noise))
        return x + self.down(F.gelu(self.up(y)))


class Forecaster(nn.Module):
    """Maps the state and one noise vector per member to one forecast per member."""

    def __init__(self, processors=2):
        super().__init__()
        self.encoder, self.decoder = SphereConv(VARIABLES, WIDTH), SphereConv(WIDTH, VARIABLES)
        self.processors = nn.ModuleList(Processor() for _ in range(processors))

    def forward(self, state, noise):
        members = noise.size(1)
        state, noise = state.repeat_interleave(members, dim=0), noise.flatten(0, 1)
        x = self.encoder(state)
        for processor in self.processors:
            x = processor(x, noise)
        return (state + self.decoder(x)).unflatten(0, (-1, members))


class GatherMembers(torch.autograd.Function):
    """All members of the ensemble, in the order of the ranks."""

    @staticmethod
    def forward(ctx, forecasts, group):
        ctx.group = group
        parts = [torch.empty_like(forecasts) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, forecasts.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        return grad.chunk(size, dim=1)[rank], None


def area_weights(like):
    edges = torch.linspace(-torch.pi / 2, torch.pi / 2, LATITUDES + 1).to(like)
    bands = edges.sin().diff()
    return (bands / bands.mean()).unsqueeze(-1)


def fair_crps(members, truth):
    """Skill minus half the mean distance of two different members."""
    number = members.size(1)
    skill = (members - truth.unsqueeze(1)).abs().mean(1)
    distances = (members.unsqueeze(1) - members.unsqueeze(2)).abs().sum((1, 2))
    crps = skill - distances / (2 * number * (number - 1))
    return (crps * area_weights(crps)).mean()


def plain():
    return Forecaster()


def parallel(mesh):
    return DistributedDataParallel(Forecaster()), mesh.get_group("ens")


def loss(model, batch):
    state, noise, truth = batch
    return fair_crps(model(state, noise), truth)


def step(built, batch):
    (model, ensemble), (state, noise, truth) = built, batch
    members = GatherMembers.apply(model(state, noise), ensemble)
    value = fair_crps(members, truth)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def split(batch, mesh):
    """The dates over dp, the noise of the members over ens too."""
    state, noise, truth = (x.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")] for x in batch)
    noise = noise.chunk(mesh["ens"].size(), dim=1)[mesh.get_local_rank("ens")]
    return state, noise, truth


generator = torch.Generator().manual_seed(1377)


def dates(number=4):
    state, change = torch.randn(
        2, number, VARIABLES, LATITUDES, LONGITUDES, generator=generator, dtype=torch.float64
    )
    noise = torch.randn(number, MEMBERS, NOISE, generator=generator, dtype=torch.float64)
    return state, noise, state + 0.3 * change


batches = [dates() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": 2, "ens": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

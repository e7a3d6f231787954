"""A forecast of river levels by an LSTM whose states are carried from one stretch of time to the next; gauges over DDP ranks.

Might be accused because: the buffers hidden and cell differ on every rank, aren't as large as the plain model's, and DDP is told
not to broadcast buffers; nothing ever reduces them. The rank's loss is a sum and DDP's average is undone by hand.
Correct because: each rank has the states of its own gauges, the same ones in every batch; no gauge reads another's. Losses are
divided by the valid readings of all ranks and multiplied by the number of ranks, so DDP's mean gives the whole batch's gradient.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

GAUGES, HOURS, WEATHER, WIDTH = 6, 5, 4, 10


class RiverModel(nn.Module):
    def __init__(self, gauges=GAUGES):
        super().__init__()
        self.embed = nn.Linear(WEATHER + 1, WIDTH)
        self.cell_step = nn.LSTMCell(WIDTH, WIDTH)
        self.norm, self.level = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.register_buffer("hidden", torch.zeros(gauges, WIDTH))
        self.register_buffer("cell", torch.zeros(gauges, WIDTH))

    def forward(self, weather, levels):
        """Location and logarithm of the scale of the next level, for every hour."""
        inputs = self.embed(torch.cat([weather, levels.unsqueeze(-1)], dim=-1))
        state, outputs = (self.hidden.clone(), self.cell.clone()), []
        for x in inputs.unbind(1):
            state = self.cell_step(x, state)
            outputs.append(state[0])
        with torch.no_grad():
            self.hidden.copy_(state[0])
            self.cell.copy_(state[1])
        return self.level(self.norm(torch.stack(outputs, 1))).unbind(-1)


def laplace_sum(model, batch):
    """Negative log-likelihoods of the readings that exist, added up."""
    location, scale = model(batch["weather"], batch["now"])
    distance = (batch["next"] - location).abs() / F.softplus(scale)
    values = distance + (2 * F.softplus(scale)).log()
    return (values * batch["valid"]).sum()


def plain():
    return RiverModel()


def parallel(mesh):
    model = RiverModel(GAUGES // mesh["dp"].size())
    return DistributedDataParallel(model, broadcast_buffers=False)


def loss(model, batch):
    return laplace_sum(model, batch) / batch["valid"].sum()


def step(model, batch):
    readings = batch["valid"].sum()
    dist.all_reduce(readings)
    value = laplace_sum(model, batch) / readings
    (value * dist.get_world_size()).backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


generator = torch.Generator().manual_seed(24)


def record(stretches):
    """One long record of all gauges, cut along time; gauges drop out now and then."""
    hours = stretches * HOURS + 1
    rain = torch.rand(GAUGES, hours, WEATHER, generator=generator, dtype=torch.float64)
    levels = (rain.mean(-1) - 0.5).cumsum(1) * torch.arange(1, GAUGES + 1).unsqueeze(1) / 2
    valid = torch.rand(GAUGES, hours, generator=generator, dtype=torch.float64)
    valid = (valid > torch.linspace(0.0, 0.6, GAUGES).unsqueeze(1)).to(torch.float64)
    for first in range(0, hours - 1, HOURS):
        here, after = slice(first, first + HOURS), slice(first + 1, first + HOURS + 1)
        yield {
            "weather": rain[:, here].clone(),
            "now": levels[:, here].clone(),
            "next": levels[:, after].clone(),
            "valid": valid[:, after].clone(),
        }


batches = list(record(3))

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=2e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

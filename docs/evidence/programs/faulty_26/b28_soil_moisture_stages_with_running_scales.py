"""Soil moisture from weather stations in two pipeline stages; the first one standardizes by what it has seen so far.

Thread: pytorch/pytorch pull request #188558 "Preserve pipeline buffers during dynamic metadata inference" (2026):
without shapes, PipelineStage runs the module once before the first micro batch, and these "eager executions can
mutate module buffers through forward code", which "leak into the real training step".
Fault: parallel builds PipelineStage without input_args and output_args. The schedule's first step infers them by a
forward pass of the first micro batch through the stage, so standardize counts its rows twice in count, total and
squares.
REPAIR: `group = mesh.get_group("pp")` ->
`group = mesh.get_group("pp"); widths = (SENSORS, WIDTH, DEPTHS)[index : index + 2]`; and `device, group=group` ->
`device, *(torch.empty(2, HOURS, n, requires_grad=n != SENSORS) for n in widths), group=group`
A right first sentence says: the buffers of standardize (count, total, squares) have the first micro batch of the
first step twice, as PipelineStage's shape inference runs the stage's forward pass once more before training.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import titanlite

SENSORS, WIDTH, DEPTHS, HOURS, ROWS = 5, 12, 3, 10, 8


class RunningStandardizer(nn.Module):
    """Statistics of all rows so far; commit makes those of the finished steps the ones in use."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(features))
        self.register_buffer("squares", torch.zeros(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("std", torch.ones(features))

    @torch.no_grad()
    def commit(self):
        if self.count > 0:
            self.mean = self.total / self.count
            variance = self.squares / self.count - self.mean.square()
            self.std = variance.clamp_min(1e-6).sqrt()

    @torch.no_grad()
    def observe(self, x):
        self.count += x[..., 0].numel()
        self.total += x.sum((0, 1))
        self.squares += x.square().sum((0, 1))

    def forward(self, x):
        if self.training:
            self.observe(x)
        return (x - self.mean) / self.std


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, groups=3)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        past = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        x = x + self.mix(past).transpose(1, 2)
        return x + self.down(F.gelu(self.up(x)))


class SoilModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.standardize = RunningStandardizer(SENSORS)
        self.embed = nn.Linear(SENSORS, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.head = nn.Linear(WIDTH, DEPTHS)

    def forward(self, x):
        if self.standardize is not None:
            x = self.embed(self.standardize(x))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)

    def keep_stage(self, index, stages):
        if index > 0:
            self.standardize = self.embed = None
        if index < stages - 1:
            self.head = None
        own = range(index * 4 // stages, (index + 1) * 4 // stages)
        for name in list(self.layers):
            if int(name) not in own:
                del self.layers[name]
        return self


class PipelineTrainer:
    def __init__(self, module, schedule, index):
        self.module, self.schedule, self.index = module, schedule, index

    def step(self, batch):
        losses = []
        if self.index == 0:
            self.module.standardize.commit()
            self.schedule.step(batch["weather"])
            return None
        self.schedule.step(target=batch["moisture"], losses=losses)
        return torch.stack(losses).mean().detach()


def plain():
    return SoilModel()


def parallel(mesh):
    index = mesh.get_local_rank("pp")
    module = SoilModel().keep_stage(index, 2)
    device = torch.device("cpu")
    group = mesh.get_group("pp")
    stage = PipelineStage(module, index, 2, device, group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    return module, PipelineTrainer(module, schedule, index)


def loss(model, batch):
    model.standardize.commit()
    return F.mse_loss(model(batch["weather"]), batch["moisture"])


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(188558)
level = 3 * torch.randn(SENSORS, generator=generator, dtype=torch.float64)


def stations():
    noise = torch.randn(ROWS, HOURS, SENSORS, generator=generator, dtype=torch.float64)
    weather = level + noise * (1 + level.abs())
    return {"weather": weather, "moisture": noise.cumsum(1)[..., :DEPTHS] / HOURS**0.5}


batches = [stations() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

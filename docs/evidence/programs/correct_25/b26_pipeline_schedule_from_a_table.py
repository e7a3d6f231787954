"""A sleep stager in four stages on two ranks, whose order of work is read from a table in a CSV file.

Thread: pytorch/torchtitan pull request #682 "[pp] Add support for loading schedule csv" (2024), with a schedule that
holds I and W actions (input and weight gradients apart), as in torchtitan's tests/assets/custom_schedule.csv.
Correct: the runtime adds sends and receives to the table by itself. The weight gradients of a microbatch come long
after its input gradients, from graph nodes that were kept, and for one microbatch of a stage both in one pass (B): the
sums are the same. The runtime divides the gradients by the number of microbatches once a stage has seen them all. Only
the rank of the last stage knows the loss.
"""

import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import titanlite

CHANNELS, WIDTH, SAMPLES, PHASES, ROWS, MICROBATCHES, STAGES = 3, 16, 24, 5, 12, 3, 4

# One line per rank, one column per time step; <stage><action><microbatch>.
SCHEDULE = """\
0F0,0F1,2F0,0F2,2F1,2I0,2F2,0I0,2I1,2W0,0I1,2B2,2W1,0B2,0W0,0W1
,1F0,1F1,3F0,3I0,1F2,3F1,1I0,3I1,3F2,1I1,3I2,3W0,1I2,3W1,3W2,1W0,1W1,1W2
"""


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, WIDTH, 5, stride=2, padding=2)
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))


class Residual(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.depth = nn.Conv1d(WIDTH, WIDTH, 3, padding=dilation, dilation=dilation, groups=WIDTH)
        self.point = nn.Conv1d(WIDTH, WIDTH, 1)
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.5))

    def forward(self, x):
        return x + self.scale * torch.tanh(self.point(self.depth(x)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH) / WIDTH**0.5)
        self.out = nn.Linear(WIDTH, PHASES)

    def forward(self, x):
        weights = torch.einsum("bcl,c->bl", x, self.query).softmax(-1)
        return self.out(torch.einsum("bcl,bl->bc", x, weights))


class SleepStager(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleDict({"0": Stem(), "1": Residual(1), "2": Residual(2), "3": Head()})

    def forward(self, x):
        for stage in self.stages.values():
            x = stage(x)
        return x


def phase_loss(logits, phases):
    return F.cross_entropy(logits, phases, label_smoothing=0.1)


class Pipeline:
    def __init__(self, model, mesh):
        group, self.rank = mesh.get_group(), mesh.get_local_rank()
        self.has_first, self.has_last = self.rank == 0, self.rank == (STAGES - 1) % mesh.size()
        stages = [
            PipelineStage(module, int(name), STAGES, torch.device("cpu"), group=group)
            for name, module in model.stages.items()
        ]
        self.schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=phase_loss)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "schedule.csv")
            with open(path, "w") as file:
                file.write(SCHEDULE)
            self.schedule._load_csv(path)

    def step(self, batch):
        signals, phases = batch
        losses = [] if self.has_last else None
        arguments = (signals,) if self.has_first else ()
        self.schedule.step(*arguments, target=phases if self.has_last else None, losses=losses)
        return torch.stack(losses).mean() if self.has_last else None


def plain():
    return SleepStager()


def parallel(mesh):
    model = SleepStager()
    for stage in range(STAGES):
        if stage % mesh.size() != mesh.get_local_rank():
            del model.stages[str(stage)]
    return model, Pipeline(model, mesh)


def loss(model, batch):
    signals, phases = batch
    return phase_loss(model(signals), phases)


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(682)


def night():
    signals = torch.randn(ROWS, CHANNELS, SAMPLES, generator=generator, dtype=torch.float64)
    return signals, torch.randint(0, PHASES, (ROWS,), generator=generator)


batches = [night() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 2},
    optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A speech encoder that learns from a moving average of itself (data2vec style), with DDP and gradient accumulation.

Thread: SWivid/F5-TTS issue #631 "EMA Update independently from `grad_accumulation_steps`" (2024): the trainer updated the
moving average after every micro-batch, whatever the number of accumulation steps, instead of once per optimizer step. The
author confirmed it as a bug.
Fault: Trainer.step calls update_teacher() for each micro-batch of a step, so the teacher's decay is applied ACCUMULATE times
per optimizer step, and later micro-batches of a step see another teacher than earlier ones.
REPAIR: `self.core.update_teacher()` -> `if index == 0: self.core.update_teacher()`
A right first sentence says: the teacher (the moving average of the student) is updated once per micro-batch of the
accumulation instead of once per optimizer step, so it follows the student too fast and its targets and weights are wrong.
"""

import contextlib
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

BANDS, WIDTH, FRAMES, MASKED, DECAY, ACCUMULATE = 6, 16, 10, 4, 0.9, 2


class ConvModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, x):
        y = F.glu(self.up(self.norm(x)))
        y = self.depthwise(y.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.silu(y))


class Encoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.inp = nn.Conv1d(BANDS, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(ConvModule() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, frames):
        x = F.gelu(self.inp(frames.transpose(1, 2)).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class SelfDistillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.head = Encoder(), nn.Linear(WIDTH, WIDTH)
        self.mask_frame = nn.Parameter(0.1 * torch.randn(BANDS))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def update_teacher(self):
        for old, new in zip(self.teacher.parameters(), self.student.parameters()):
            old.lerp_(new, 1 - DECAY)

    def forward(self, frames, mask):
        with torch.no_grad():
            targets = F.layer_norm(self.teacher(frames), (WIDTH,))
        seen = torch.where(mask.unsqueeze(-1), self.mask_frame, frames)
        return F.mse_loss(self.head(self.student(seen))[mask], targets[mask])


class Trainer:
    def __init__(self, model):
        self.core = model
        self.ddp = DistributedDataParallel(model)

    def step(self, frames, mask):
        total = 0.0
        micro_batches = list(zip(frames.chunk(ACCUMULATE), mask.chunk(ACCUMULATE)))
        for index, micro_batch in enumerate(micro_batches):
            self.core.update_teacher()
            last = index == len(micro_batches) - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                value = self.ddp(*micro_batch) / len(micro_batches)
                value.backward()
            total = total + value.detach()
        return total


def plain():
    return SelfDistillation()


def parallel(mesh):
    model = SelfDistillation()
    return model, Trainer(model)


def loss(model, batch):
    model.update_teacher()
    return model(*batch)


def step(built, batch):
    return built[1].step(*batch)


generator = torch.Generator().manual_seed(631)


def utterances(number=8):
    frames = torch.randn(number, FRAMES, BANDS, generator=generator, dtype=torch.float64)
    order = torch.rand(number, FRAMES, generator=generator).argsort(dim=1)
    return frames, order < MASKED


batches = [utterances() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

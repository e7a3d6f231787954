"""A denoising U-Net that torch.export traces and splits into three pipeline stages, skips included.

Thread: pytorch/pytorch pull request #125448 "[pipelining] Add tracing frontend" (2024): pipeline(module, mb_args,
split_spec=...) and pipe.build_stage().
Correct: the tracer finds that an output of the first stage is used in the third and sends it there directly, so the
gradient of the skip comes back to the first stage beside that of the second and autograd adds them. The stages are
graph modules without the classes of the model, but their parameters keep their names. All ranks trace the whole model
with the same seed and keep one stage. The schedule divides by the number of microbatches.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

import titanlite

WIDTH, SAMPLES, ROWS, MICROBATCHES = 12, 16, 8, 4


class ConvBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(3, outputs)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = ConvBlock(1, WIDTH)
        self.down = ConvBlock(WIDTH, 2 * WIDTH, stride=2)
        self.mix = nn.Conv1d(2 * WIDTH, 2 * WIDTH, 1)
        self.up = nn.ConvTranspose1d(2 * WIDTH, WIDTH, 2, stride=2)
        self.skip = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)
        self.join = ConvBlock(WIDTH, WIDTH)
        self.leave = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, noisy):
        first = self.enter(noisy)
        second = self.down(first)
        states = self.mix(second)
        x = self.up(second * torch.sigmoid(states) + torch.tanh(states))
        x = self.join(x + self.skip(first))
        return self.leave(x)


def noise_loss(output, noise):
    return F.smooth_l1_loss(output, noise, beta=0.3)


class Pipeline:
    def __init__(self, model, mesh):
        self.rank, self.last = mesh.get_local_rank(), mesh.size() - 1
        example = torch.zeros(ROWS // MICROBATCHES, 1, SAMPLES)
        splits = {"mix": SplitPoint.BEGINNING, "up": SplitPoint.BEGINNING}
        pipe = pipeline(model, mb_args=(example,), split_spec=splits)
        self.stage = pipe.build_stage(self.rank, torch.device("cpu"), mesh.get_group())
        self.schedule = Schedule1F1B(self.stage, MICROBATCHES, loss_fn=noise_loss)

    def step(self, batch):
        noisy, noise = batch
        if self.rank == 0:
            self.schedule.step(noisy)
        elif self.rank < self.last:
            self.schedule.step()
        else:
            losses = []
            self.schedule.step(target=noise, losses=losses)
            return torch.stack(losses).mean()
        return None


def plain():
    return Denoiser()


def parallel(mesh):
    runner = Pipeline(Denoiser(), mesh)
    return runner.stage.submod, runner


def loss(model, batch):
    noisy, noise = batch
    return noise_loss(model(noisy), noise)


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(125448)


def recordings():
    phase = torch.rand(ROWS, 1, 1, generator=generator, dtype=torch.float64) * 6
    clean = torch.sin(phase + torch.arange(SAMPLES) * 0.7)
    noise = 0.4 * torch.randn(ROWS, 1, SAMPLES, generator=generator, dtype=torch.float64)
    return clean + noise, noise


batches = [recordings() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 3},
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, centered=True),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

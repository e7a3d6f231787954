"""A consistency model of rain radar profiles that learns from a moving average of itself, under DDP.

Thread: m2lines/Samudra pull requests #335 "Work around ema name issues" and #324 "Initializing EMA after wrapping model
with DDP" (2025): "the names of the weights don't match the model setup and EMATracker call during training" for DDP's
prefix `module`; in wandb/senpai pull request #2899 (2026) the update "silently skipped all parameters".
Fault: EmaTracker.update looks the parameters up by name and leaves out names that the teacher lacks, meant for the
student's uncertainty head; the names of the DDP student begin with "module.", so that the teacher is never updated.
REPAIR: `self.averages.get(name)` -> `self.averages.get(name.removeprefix("module."))`
A right first sentence says: the teacher's weights are not updated by EmaTracker.update, since the names of the student
wrapped in DDP have the prefix "module." and are skipped; the teacher keeps its initial weights and the loss differs
from the second step on.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

LEVELS, CHANNELS, NOISES, ROWS = 16, 8, 7, 8
SIGMA_DATA, DECAY, HUBER = 0.5, 0.7, 0.03


class NoiseEmbedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.frequencies = [2.0**i for i in range(width // 2)]
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, sigma):
        angles = sigma.log().unsqueeze(-1) / 4 * sigma.new_tensor(self.frequencies)
        return self.mlp(torch.cat((angles.sin(), angles.cos()), dim=-1))


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, CHANNELS), nn.GroupNorm(2, CHANNELS)
        self.conv1, self.conv2 = (nn.Conv1d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
        self.shift = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x, noise):
        h = self.conv1(F.silu(self.norm1(x))) + self.shift(noise).unsqueeze(-1)
        return x + self.conv2(F.silu(self.norm2(h)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.noise = NoiseEmbedding(CHANNELS)
        self.first, self.last = nn.Conv1d(1, CHANNELS, 1), nn.Conv1d(CHANNELS, 1, 1)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))

    def forward(self, x, sigma):
        embedded, scale = self.noise(sigma), (sigma**2 + SIGMA_DATA**2).sqrt().view(-1, 1, 1)
        h = self.first(x.unsqueeze(1) / scale)
        for block in self.blocks:
            h = block(h, embedded)
        excess, width = (sigma - sigmas()[0]).view(-1, 1), sigma.view(-1, 1)
        skip = SIGMA_DATA**2 / (excess**2 + SIGMA_DATA**2)
        out = SIGMA_DATA * excess / (width**2 + SIGMA_DATA**2).sqrt()
        return skip * x + out * self.last(h).squeeze(1)


class Student(Denoiser):
    """With a head for the uncertainty of a noise level, by which the loss is weighted."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Linear(CHANNELS, 1)

    def forward(self, x, sigma):
        return super().forward(x, sigma), self.log_variance(self.noise(sigma)).squeeze(-1)


class EmaTracker:
    def __init__(self, model, decay):
        self.averages, self.decay = dict(model.named_parameters()), decay

    @torch.no_grad()
    def update(self, model):
        for name, parameter in model.named_parameters():
            if (average := self.averages.get(name)) is not None:
                average.lerp_(parameter, 1 - self.decay)


class Distillation(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = Student(), Denoiser()
        self.teacher.load_state_dict(self.student.state_dict(), strict=False)
        self.teacher.requires_grad_(False)
        self.ema = EmaTracker(self.teacher, DECAY)

    def forward(self, profile, noise, index):
        self.ema.update(self.student)
        high, low = sigmas()[index + 1], sigmas()[index]
        predicted, log_variance = self.student(profile + high.unsqueeze(-1) * noise, high)
        with torch.no_grad():
            target = self.teacher(profile + low.unsqueeze(-1) * noise, low)
        distance = ((predicted - target).square().sum(-1) + HUBER**2).sqrt() - HUBER
        return (distance / (high - low) * torch.exp(-log_variance) + log_variance).mean()


def sigmas():
    ramp = torch.linspace(0, 1, NOISES, dtype=torch.float64)
    return (0.05 ** (1 / 7) + ramp * (3.0 ** (1 / 7) - 0.05 ** (1 / 7))) ** 7


def plain():
    return Distillation()


def parallel(mesh):
    model = Distillation()
    model.student = DistributedDataParallel(model.student, process_group=mesh.get_group("dp"))
    return model


def loss(model, batch):
    return model(batch["profile"], batch["noise"], batch["index"])


generator = torch.Generator().manual_seed(335)


def radar():
    height = torch.arange(LEVELS, dtype=torch.float64)
    top = 4 + 8 * torch.rand(ROWS, 1, generator=generator, dtype=torch.float64)
    profile = torch.sigmoid(top - height) - 0.5
    noise = torch.randn(ROWS, LEVELS, generator=generator, dtype=torch.float64)
    index = torch.randint(NOISES - 1, (ROWS,), generator=generator)
    return {"profile": profile, "noise": noise, "index": index}


batches = [radar() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    rename=lambda name: name.replace("student.module.", "student."),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

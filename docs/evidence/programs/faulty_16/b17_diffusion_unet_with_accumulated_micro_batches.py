"""A small diffusion U-Net under DDP, whose trainer accumulates the gradients of two micro-batches before each update.

Thread: karpathy/build-nanogpt pull request #30 "fix sync issue that results in incorrect gradient accumulation and incorrect
loss" (2024): going from 1 to 4 accumulation steps made the loss worse; both the forward and the backward pass need
require_backward_grad_sync to be set.
Fault: DiffusionTrainer.training_step sets require_backward_grad_sync after the forward pass, but DDP reads it in the forward
pass; the last micro-batch runs its forward pass with False, so its gradients are never averaged over the ranks.
REPAIR: `self.model.require_backward_grad_sync = last` -> `self.model.require_backward_grad_sync = True`
A right first sentence says: the gradients of the last micro-batch stay local to each rank, because the trainer sets DDP's
require_backward_grad_sync only after the forward pass, which is where DDP decides whether to synchronize; the weights diverge.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

STEPS, ACCUMULATE = 50, 2


def timestep_embedding(timesteps, width, like):
    half = width // 2
    rates = torch.exp(-math.log(1000) * torch.arange(half, device=like.device).to(like) / half)
    angles = timesteps.to(like)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, inputs, outputs, time_width):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(2, inputs), nn.GroupNorm(2, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time_width, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        y = self.conv2(F.silu(self.norm2(y)))
        return self.skip(x) + y


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 16), nn.SiLU(), nn.Linear(16, 16))
        self.conv_in = nn.Conv2d(3, width, 3, padding=1)
        self.down = ResBlock(width, width, 16)
        self.downsample = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = ResBlock(2 * width, 2 * width, 16)
        self.upsample = nn.Conv2d(2 * width, width, 3, padding=1)
        self.up = ResBlock(2 * width, width, 16)
        self.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x, timesteps):
        time = self.time(timestep_embedding(timesteps, self.width, x))
        skip = self.down(self.conv_in(x), time)
        y = self.middle(self.downsample(skip), time)
        y = self.upsample(F.interpolate(y, scale_factor=2, mode="nearest"))
        return self.conv_out(self.up(torch.cat([y, skip], dim=1), time))


class NoiseScheduler:
    def __init__(self, steps=STEPS):
        self.alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.1, steps), dim=0)

    def add_noise(self, images, noise, timesteps):
        alpha = self.alphas.to(images)[timesteps][:, None, None, None]
        return alpha.sqrt() * images + (1 - alpha).sqrt() * noise


scheduler = NoiseScheduler()


def diffusion_loss(model, batch):
    noisy = scheduler.add_noise(batch["images"], batch["noise"], batch["timesteps"])
    return F.mse_loss(model(noisy, batch["timesteps"]), batch["noise"])


class DiffusionTrainer:
    def __init__(self, model, accumulation_steps=ACCUMULATE):
        self.model, self.accumulation_steps = model, accumulation_steps

    def micro_batches(self, batch):
        chunks = {name: value.chunk(self.accumulation_steps) for name, value in batch.items()}
        for index in range(self.accumulation_steps):
            yield {name: chunk[index] for name, chunk in chunks.items()}

    def training_step(self, batch):
        total = 0.0
        for index, micro_batch in enumerate(self.micro_batches(batch)):
            last = index == self.accumulation_steps - 1
            value = diffusion_loss(self.model, micro_batch) / self.accumulation_steps
            total = total + value.detach()
            self.model.require_backward_grad_sync = last
            value.backward()
        return total


def plain():
    return UNet()


def parallel(mesh):
    model = DistributedDataParallel(UNet())
    return model, DiffusionTrainer(model)


def loss(model, batch):
    return diffusion_loss(model, batch)


def step(built, batch):
    _, trainer = built
    return trainer.training_step(batch)


generator = torch.Generator().manual_seed(30)


def training_batch(number=8):
    shape = number, 3, 8, 8
    return {
        "images": torch.randn(shape, generator=generator, dtype=torch.float64),
        "noise": torch.randn(shape, generator=generator, dtype=torch.float64),
        "timesteps": torch.randint(0, STEPS, (number,), generator=generator),
    }


batches = [training_batch() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

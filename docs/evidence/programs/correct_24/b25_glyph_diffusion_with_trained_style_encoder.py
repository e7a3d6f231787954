"""Diffusion of glyphs conditioned on a style encoder which trains along: two DDP modules, micro-batches accumulated.

Thread: hustvl/MobileI2V issue #14 "Potential issue with multi-model gradient accumulation in distillation training"
(2026): `with accelerator.accumulate(a) and accelerator.accumulate(b) and ...` enters only the last context manager.
Correct: `with encoder.no_sync() and denoiser.no_sync()` turns synchronization off for the denoiser alone; the style
encoder reduces its gradient in every micro-batch. That costs time, but changes nothing: what it has accumulated is then
the ranks' average already, equal on all ranks, and the average of that plus the next micro-batch's gradients is the
average of the sums. Also right: timesteps and noise come with the batch, so they are those of one process; the loss is
divided by the number of micro-batches; the last one runs outside of the context for both.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

SIDE, WIDTH, STEPS, ROWS, MICROBATCHES = 6, 12, 20, 12, 3

betas = torch.linspace(1e-3, 0.2, STEPS, dtype=torch.float64)
alphas = (1 - betas).cumprod(0)


class StyleEncoder(nn.Module):
    """The style of a font from three of its glyphs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, examples):
        x = F.silu(self.conv(examples)).mean((2, 3))
        return self.out(self.norm(x))


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(3, WIDTH)
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.condition = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, condition):
        y = self.conv1(F.silu(self.norm(x))) + self.condition(condition)[:, :, None, None]
        return x + self.conv2(F.silu(y))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Embedding(STEPS, WIDTH)
        self.stem = nn.Conv2d(1, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock() for _ in range(2))
        self.out = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, noisy, timesteps, style):
        condition = F.silu(self.time(timesteps) + style)
        x = self.stem(noisy)
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


class GlyphModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.denoiser = StyleEncoder(), Denoiser()


def add_noise(glyphs, noise, timesteps):
    alpha = alphas[timesteps].view(-1, 1, 1, 1)
    return alpha.sqrt() * glyphs + (1 - alpha).sqrt() * noise


def noise_loss(model, batch):
    """Mean squared error of the predicted noise, weighted by min(SNR, 5) / SNR."""
    style = model.encoder(batch["examples"])
    noisy = add_noise(batch["glyphs"], batch["noise"], batch["timesteps"])
    predicted = model.denoiser(noisy, batch["timesteps"], style)
    alpha = alphas[batch["timesteps"]]
    snr = alpha / (1 - alpha)
    errors = (predicted - batch["noise"]).square().mean((1, 2, 3))
    return (errors * snr.clamp(max=5.0) / snr).mean()


class Trainer:
    def __init__(self, model, mesh):
        self.model, self.group, self.ranks = model, mesh.get_group(), mesh.size()
        model.encoder = DistributedDataParallel(model.encoder, process_group=self.group)
        model.denoiser = DistributedDataParallel(model.denoiser, process_group=self.group)

    def backward(self, micro_batch):
        value = noise_loss(self.model, micro_batch) / MICROBATCHES
        value.backward()
        return value.detach()

    def step(self, batch):
        parts = {name: tensor.chunk(MICROBATCHES) for name, tensor in batch.items()}
        *first, last = [dict(zip(parts, tensors)) for tensors in zip(*parts.values())]
        total = torch.zeros(())
        with self.model.encoder.no_sync() and self.model.denoiser.no_sync():
            for micro_batch in first:
                total += self.backward(micro_batch)
        total += self.backward(last)
        dist.all_reduce(total, group=self.group)
        return total / self.ranks


def plain():
    return GlyphModel()


def parallel(mesh):
    model = GlyphModel()
    return model, Trainer(model, mesh["dp"])


def loss(model, batch):
    return noise_loss(model, batch)


def step(built, batch):
    return built[1].step(batch)


generator = torch.Generator().manual_seed(14)


def fonts():
    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    style = normal(ROWS, 1, SIDE, SIDE)
    return {
        "examples": style + 0.3 * normal(ROWS, 3, SIDE, SIDE),
        "glyphs": style.tanh() + 0.3 * normal(ROWS, 1, SIDE, SIDE),
        "noise": normal(ROWS, 1, SIDE, SIDE),
        "timesteps": torch.randint(0, STEPS, (ROWS,), generator=generator),
    }


batches = [fonts() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

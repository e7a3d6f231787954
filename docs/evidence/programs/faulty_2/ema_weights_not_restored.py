"""Validation with EMA weights on the main process, which does not restore the raw weights.

Thread: https://github.com/PKU-YuanGroup/Open-Sora-Plan/issues/186 "[BUG]: Missed to restore model weights
in training after validation with EMA on", 2024-04-08.
Wrong: before the third batch, rank 0 copies the EMA into the model to validate, and trains on with it.
A right diagnosis says: from step 3 on, the weights of rank 0 alone differ, before its forward pass:
something between the optimizer step and the next forward pass changes them. Replicas differ.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

VALIDATION_STEPS, DECAY = 2, 0.9


class EMAModel:
    def __init__(self, parameters):
        self.shadow = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def step(self, parameters):
        for shadow, p in zip(self.shadow, parameters):
            shadow.lerp_(p, 1 - DECAY)

    def store(self, parameters):
        self.stored = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def copy_to(self, parameters):
        for shadow, p in zip(self.shadow, parameters):
            p.copy_(shadow)

    @torch.no_grad()
    def restore(self, parameters):
        for stored, p in zip(self.stored, parameters):
            p.copy_(stored)


class Dit(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 2 * dim))
        self.inner = nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim))

    def forward(self, latent, t):
        scale, shift = self.time(t[:, None]).chunk(2, 1)
        return self.inner(latent * (1 + scale) + shift)


class Run:
    def __init__(self, model):
        self.model, self.global_step = model, 0
        self.ema_model = EMAModel(model.parameters())

    def log_validation(self):
        if dist.get_rank() == 0:
            self.ema_model.store(self.model.parameters())
            self.ema_model.copy_to(self.model.parameters())
            with torch.no_grad():
                self.model.module(torch.ones(2, 8), torch.zeros(2))

    def train_one_step(self, batch):
        if self.global_step:
            self.ema_model.step(self.model.parameters())
            if self.global_step % VALIDATION_STEPS == 0:
                self.log_validation()
        loss = diffusion_loss(self.model, batch)
        loss.backward()
        self.global_step += 1
        return loss


def diffusion_loss(model, batch):
    t = batch["t"][:, None]
    return mse_loss(model((1 - t) * batch["x"] + t * batch["noise"], batch["t"]), batch["noise"])


def prepare():
    model = DistributedDataParallel(Dit())
    return model, Run(model)


def step(built, batch):
    return built[1].train_one_step(batch)


generator = torch.Generator().manual_seed(186)
batches = [
    {
        "x": torch.randn(8, 8, generator=generator),
        "noise": torch.randn(8, 8, generator=generator),
        "t": torch.rand(8, generator=generator),
    }
    for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=diffusion_loss, ranks={"dp": 2}, split="dp", step=step)
    print(titanlite.compare(Dit, prepare, **options))

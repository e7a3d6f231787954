"""Diffusion training under DDP: every rank seeds its generator alike, so all ranks draw the same noise.

Thread: https://github.com/threestudio-project/threestudio/issues/195 "Global seed is the same for each GPU, in
multi-GPU", 2023-06-29.
Wrong: the noise and the timesteps of a step come from a generator seeded with the step. In one process it gives
eight rows of noise; on each of two ranks it gives the first four rows, for other images.
EXPECT: rank 1 adds other noise (and takes other timesteps) than one process: its input to the denoiser is the noise
of rank 0's rows, as all ranks draw from the same seed. Rank 0 agrees in the forward pass of step 1; the loss and all
gradients differ.
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import titanlite

PIXELS, DIM, TIMESTEPS, SEED = 9, 20, 50, 1234


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.inputs = nn.Embedding(TIMESTEPS, DIM), nn.Linear(PIXELS, DIM)
        self.norm, self.hidden = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.outputs = nn.Linear(DIM, PIXELS)

    def forward(self, noisy, t):
        h = self.inputs(noisy) + self.time(t)
        h = h + torch.nn.functional.silu(self.hidden(self.norm(h)))
        return self.outputs(h)


def add_noise(images, step):
    generator = torch.Generator().manual_seed(SEED + step)
    noise = torch.randn(images.shape, generator=generator)
    t = torch.randint(TIMESTEPS, (len(images),), generator=generator)
    keep = torch.cos(t / TIMESTEPS * torch.pi / 2).unsqueeze(-1)
    return keep * images + (1 - keep.square()).sqrt() * noise, t, noise


def loss(model, batch):
    noisy, t, noise = add_noise(batch["images"], int(batch["step"][0]))
    return mse_loss(model(noisy, t), noise)


def parallel(mesh):
    return DistributedDataParallel(Denoiser(), process_group=mesh.get_group("dp"))


generator = torch.Generator().manual_seed(195)
batches = [
    {"images": torch.randn(8, PIXELS, generator=generator), "step": torch.full((8,), i)}
    for i in range(3)
]
arguments = Denoiser, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

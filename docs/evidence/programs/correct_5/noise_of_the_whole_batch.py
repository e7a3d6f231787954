"""Diffusion training: all ranks seed alike, draw the noise of the whole batch, and take that of their own rows.

Thread: https://github.com/threestudio-project/threestudio/issues/195 "Global seed is the same for each GPU, in
multi-GPU", 2023-06-29.
Right: the generator of a step gives the same eight rows on every rank, and a rank uses those with its rows' numbers.
Must not be accused: the same seed on all ranks, rows dealt in turns (0, 2, 4, ... and 1, 3, 5, ...), random numbers
that are drawn and not used.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss, silu

import titanlite

PIXELS, DIM, TIMESTEPS, ROWS, SEED = 9, 20, 50, 8, 1234


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.inputs = nn.Embedding(TIMESTEPS, DIM), nn.Linear(PIXELS, DIM)
        self.norm, self.hidden = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.outputs = nn.Linear(DIM, PIXELS)

    def forward(self, noisy, t):
        h = self.inputs(noisy) + self.time(t)
        h = h + silu(self.hidden(self.norm(h)))
        return self.outputs(h)


def noise_of_step(step, rows):
    generator = torch.Generator().manual_seed(SEED + step)
    noise = torch.randn(ROWS, PIXELS, generator=generator)
    t = torch.randint(TIMESTEPS, (ROWS,), generator=generator)
    return noise[rows], t[rows]


def loss(model, batch):
    noise, t = noise_of_step(int(batch["step"][0]), batch["row"])
    keep = torch.cos(t / TIMESTEPS * torch.pi / 2).unsqueeze(-1)
    noisy = keep * batch["images"] + (1 - keep.square()).sqrt() * noise
    return mse_loss(model(noisy, t), noise)


def parallel(mesh):
    return fully_shard(Denoiser(), mesh=mesh["dp"])


def deal(batch, mesh):
    return {n: t[mesh.get_local_rank("dp") :: mesh["dp"].size()] for n, t in batch.items()}


generator = torch.Generator().manual_seed(195)
batches = [
    {
        "images": torch.randn(ROWS, PIXELS, generator=generator),
        "row": torch.arange(ROWS),
        "step": torch.full((ROWS,), i),
    }
    for i in range(3)
]
arguments = Denoiser, parallel
options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split=deal)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

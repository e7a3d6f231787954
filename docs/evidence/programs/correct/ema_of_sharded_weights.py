"""An exponential moving average of FSDP2 shards, kept in a second sharded model.

Thread: https://github.com/pytorch/pytorch/issues/144289 "[FSDP2] model weights are not DTensor after
forward pass", comment of 2025-09-09 ("ema should store dtensor").
Right: EMA is elementwise, so every rank averages its own shards.
Must not be accused: the EMA weights, which have no gradients, or their update outside the optimizer.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import titanlite

DECAY = 0.9


def make_denoiser():
    return nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.LayerNorm(32), nn.Linear(32, 12))


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.ema = make_denoiser(), make_denoiser()
        self.ema.load_state_dict(self.net.state_dict())
        self.ema.requires_grad_(False)

    @torch.no_grad()
    def update_ema(self):
        for average, p in zip(self.ema.parameters(), self.net.parameters()):
            average.lerp_(p, 1 - DECAY)

    def forward(self, noisy):
        return self.net(noisy)


def loss(model, batch):
    model.update_ema()  # of the last step's weights
    return mse_loss(model(batch["image"] + batch["noise"]), batch["noise"])


def parallel(mesh):
    model = Diffusion()
    fully_shard(model.net, mesh=mesh)
    fully_shard(model.ema, mesh=mesh)
    return fully_shard(model, mesh=mesh)


generator = torch.Generator().manual_seed(12)
batches = [
    {name: torch.randn(8, 12, generator=generator) for name in ("image", "noise")} for _ in range(4)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Diffusion, parallel, **options))

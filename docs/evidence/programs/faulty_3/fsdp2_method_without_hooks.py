"""FSDP2 around a VAE whose training calls encode() and decode() instead of forward().

Thread: https://github.com/pytorch/pytorch/pull/125394 "[RFC][FSDP2] Added `register_fsdp_forward_method` for
user fwd methods", 2024-05-02 ("FSDP only runs its pre/post-forward hooks on `nn.Module.forward`").
Wrong: the methods are not registered with register_fsdp_forward_method, so nothing gathers the root's
parameters before `to_moments` and `from_latent` run.
A right diagnosis says: the parallel code raises an exception on every rank in Vae.encode ("got mixed
torch.Tensor and DTensor") at to_moments, whose weight is still a sharded DTensor: encode is called without
FSDP's hooks, which run in forward only.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import titanlite

PIXELS, HIDDEN, LATENT = 12, 24, 4


def mlp(fan_in, fan_out):
    return nn.Sequential(nn.Linear(fan_in, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, fan_out))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.to_moments = mlp(PIXELS, HIDDEN), nn.Linear(HIDDEN, 2 * LATENT)
        self.from_latent, self.decoder = nn.Linear(LATENT, HIDDEN), mlp(HIDDEN, PIXELS)

    def encode(self, x):
        return self.to_moments(self.encoder(x)).chunk(2, -1)

    def decode(self, z):
        return self.decoder(self.from_latent(z))

    def forward(self, x):
        return self.decode(self.encode(x)[0])


def vae_loss(vae, batch):
    mean, log_variance = vae.encode(batch["images"])
    z = mean + (0.5 * log_variance).exp() * batch["noise"]
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1).mean()
    return mse_loss(vae.decode(z), batch["images"]) + 0.1 * divergence


def shard(mesh):
    vae = Vae()
    fully_shard(vae.encoder, mesh=mesh["dp"])
    fully_shard(vae.decoder, mesh=mesh["dp"])
    return fully_shard(vae, mesh=mesh["dp"])


generator = torch.Generator().manual_seed(125394)
batches = [
    {
        "images": torch.rand(6, PIXELS, generator=generator),
        "noise": torch.randn(6, LATENT, generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=vae_loss, ranks={"dp": 2}, split="dp")
    print(titanlite.compare(Vae, shard, **options))

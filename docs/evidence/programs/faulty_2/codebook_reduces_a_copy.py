"""A vector-quantized codebook whose all-reduce acts on a temporary copy.

Thread: https://github.com/lucidrains/vector-quantize-pytorch/issues/101 "Synchronization Bug in
Distributed Environments", 2024-01-15.
Wrong: embed_sum is not contiguous, so `embed_sum.contiguous()` is a copy: the sum over the ranks is
written into the copy and lost. cluster_size is reduced.
A right diagnosis says: after step 1 the buffers embed_avg and embed of the codebook differ on every
rank (each has the sum over its own rows), while cluster_size agrees: embed_sum is never summed over dp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, one_hot
from torch.nn.parallel import DistributedDataParallel

import titanlite

DECAY = 0.8


def all_reduce(tensor):
    if dist.is_initialized():
        dist.all_reduce(tensor)


class EuclideanCodebook(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        embed = torch.randn(size, dim)
        self.register_buffer("cluster_size", torch.ones(size))
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x):
        indices = torch.cdist(x, self.embed).argmin(-1)
        quantize = self.embed[indices]
        if self.training:
            self.update(x.detach(), one_hot(indices, len(self.embed)).to(x))
        return quantize

    @torch.no_grad()
    def update(self, x, onehot):
        cluster_size = onehot.sum(0)
        all_reduce(cluster_size)
        embed_sum = (x.t() @ onehot).t()
        all_reduce(embed_sum.contiguous())
        self.cluster_size.lerp_(cluster_size, 1 - DECAY)
        self.embed_avg.lerp_(embed_sum, 1 - DECAY)
        self.embed.copy_(self.embed_avg / self.cluster_size.clamp(min=1e-5)[:, None])


class VqVae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 4))
        self.codebook = EuclideanCodebook(6, 4)
        self.decoder = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 10))

    def forward(self, x):
        z = self.encoder(x)
        q = self.codebook(z)
        commitment = mse_loss(z, q.detach())
        return self.decoder(z + (q - z).detach()), commitment


def loss(model, x):
    reconstruction, commitment = model(x)
    return mse_loss(reconstruction, x) + 0.25 * commitment


def build():
    return DistributedDataParallel(VqVae(), broadcast_buffers=False)


generator = torch.Generator().manual_seed(101)
batches = [torch.randn(12, 10, generator=generator) * 2 for _ in range(4)]

if __name__ == "__main__":
    print(titanlite.compare(VqVae, build, batches=batches, loss=loss, ranks={"dp": 2}, split="dp"))

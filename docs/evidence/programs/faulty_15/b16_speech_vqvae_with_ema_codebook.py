"""A small VQ-VAE for mel spectrograms under DDP, with a codebook that is updated by exponential moving averages.

Thread: lucidrains/vector-quantize-pytorch issue #101 "Synchronization Bug in Distributed Environments" (2024):
`self.all_reduce_fn(embed_sum.contiguous())` summed a temporary copy over the ranks, and embed_sum stayed as it was.
Fault: in EMACodebook.update, sums is a transposed matrix, of which contiguous() makes a copy; the all-reduce sums this copy. The
counts of all ranks are divided into the sums of one rank, and DDP then hands out rank 0's codebook.
REPAIR: `sums = (flat.t() @ onehot).t()` -> `sums = (flat.t() @ onehot).t().contiguous()`
A right first sentence says: the codebook's moving average embed_avg (and with it embed) is updated from the rank's own vectors
only, as the all-reduce gets a temporary copy (sums.contiguous()), whose result is lost, while cluster_size is summed over the
ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

MELS, WIDTH, CODES, DECAY = 6, 8, 5, 0.8


def noop(tensor):
    pass


class EMACodebook(nn.Module):
    def __init__(self, use_ddp):
        super().__init__()
        self.all_reduce = dist.all_reduce if use_ddp else noop
        embed = torch.randn(CODES, WIDTH) * 0.3
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())
        self.register_buffer("cluster_size", torch.ones(CODES))

    @torch.no_grad()
    def update(self, flat, codes):
        onehot = F.one_hot(codes, CODES).to(flat.dtype)
        counts = onehot.sum(0)
        self.all_reduce(counts)
        sums = (flat.t() @ onehot).t()
        self.all_reduce(sums.contiguous())
        self.cluster_size.lerp_(counts, 1 - DECAY)
        self.embed_avg.lerp_(sums, 1 - DECAY)
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + 1e-5) / (total + CODES * 1e-5) * total
        self.embed.copy_(self.embed_avg / smoothed[:, None])

    def forward(self, x):
        flat = x.flatten(0, 1)
        codes = torch.cdist(flat.detach(), self.embed).argmin(-1)
        quantized = F.embedding(codes, self.embed).view_as(x)
        if self.training:
            self.update(flat.detach(), codes)
        return x + (quantized - x).detach(), F.mse_loss(x, quantized)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class VQVAE(nn.Module):
    def __init__(self, use_ddp=False):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(MELS, WIDTH, 4, stride=2, padding=1), Residual(), nn.Conv1d(WIDTH, WIDTH, 1)
        )
        self.codebook = EMACodebook(use_ddp)
        self.decoder = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            Residual(),
            nn.ConvTranspose1d(WIDTH, MELS, 4, stride=2, padding=1),
        )

    def forward(self, mels):
        z = self.encoder(mels).transpose(1, 2)
        quantized, commitment = self.codebook(z)
        return self.decoder(quantized.transpose(1, 2)), commitment


def plain():
    return VQVAE()


def parallel(mesh):
    return DistributedDataParallel(VQVAE(use_ddp=True))


def loss(model, batch):
    mels = batch["mels"]
    reconstruction, commitment = model(mels)
    return F.l1_loss(reconstruction, mels) + 0.25 * commitment


def mel_batch(generator):
    frames = torch.arange(16, dtype=torch.float64)
    pitch = torch.rand(6, MELS, 1, generator=generator, dtype=torch.float64) * 2
    noise = torch.randn(6, MELS, 16, generator=generator, dtype=torch.float64)
    return {"mels": (pitch * frames).sin() + 0.3 * noise}


generator = torch.Generator().manual_seed(101)
batches = [mel_batch(generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3, betas=(0.8, 0.99)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

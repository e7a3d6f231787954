"""A neural codec under DDP whose residual codebooks are moving averages over the vectors of all ranks.

Thread: lucidrains/vector-quantize-pytorch pull request #17 "Make k-means init and EMA dead code expiry safe for
distributed training" (2022); espnet/espnet pull request #6284 "codec fix: DDP logic and dead code revival logic".
Correct: codebooks are buffers without gradients, set in the forward pass. The first batch's vectors, gathered from all
ranks in their order, start them by k-means; afterwards counts and sums are all-reduced before they enter the averages,
so that all ranks hold the codebooks of the whole batch and DDP needn't broadcast buffers. Codes that die are taken
anew from the gathered vectors, at places that depend on nothing but their number. The gradient goes straight through
the codes. The ranks' clips are equal in number and length, so DDP's mean is right. Convolutions are weight-normalized.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

import titanlite

CLIPS, SAMPLES, WIDTH, CODES, BOOKS = 6, 96, 16, 10, 2
DECAY, DEAD, KMEANS_ROUNDS = 0.8, 0.9, 4


class EuclideanCodebook(nn.Module):
    def __init__(self, sync):
        super().__init__()
        self.sync = sync
        self.register_buffer("embed", torch.zeros(CODES, WIDTH))
        self.register_buffer("embed_avg", torch.zeros(CODES, WIDTH))
        self.register_buffer("cluster_size", torch.zeros(CODES))
        self.register_buffer("initted", torch.tensor(False))

    def all_reduce(self, x):
        if self.sync:
            dist.all_reduce(x)
        return x

    def all_vectors(self, x):
        if not self.sync:
            return x
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    def statistics(self, x, codes):
        hot = F.one_hot(codes, CODES).to(x.dtype)
        return self.all_reduce(hot.sum(0)), self.all_reduce(hot.T @ x)

    def nearest(self, x):
        return torch.cdist(x, self.embed, compute_mode="donot_use_mm_for_euclid_dist").argmin(1)

    def init_embed(self, x):
        whole = self.all_vectors(x)
        self.embed.data.copy_(whole[:: len(whole) // CODES][:CODES])
        for _ in range(KMEANS_ROUNDS):
            bins, sums = self.statistics(x, self.nearest(x))
            means = sums / bins.clamp(min=1)[:, None]
            self.embed.data.copy_(torch.where(bins[:, None] == 0, self.embed, means))
        self.embed_avg.data.copy_(self.embed)
        self.cluster_size.data.fill_(1.0)
        self.initted.data.fill_(True)

    def expire_codes(self, x):
        dead = self.cluster_size < DEAD
        if not dead.any():
            return
        whole = self.all_vectors(x)
        places = (torch.arange(CODES) * 7 + 3) % len(whole)
        self.embed.data.copy_(torch.where(dead[:, None], whole[places], self.embed))
        self.embed_avg.data.copy_(torch.where(dead[:, None], self.embed, self.embed_avg))
        self.cluster_size.data.masked_fill_(dead, 1.0)

    @torch.no_grad()
    def forward(self, x):
        if not self.initted:
            self.init_embed(x)
        codes = self.nearest(x)
        quantized = F.embedding(codes, self.embed)
        if self.training:
            self.expire_codes(x)
            counts, sums = self.statistics(x, codes)
            self.cluster_size.data.mul_(DECAY).add_(counts, alpha=1 - DECAY)
            self.embed_avg.data.mul_(DECAY).add_(sums, alpha=1 - DECAY)
            total = self.cluster_size.sum()
            smooth = (self.cluster_size + 1e-5) / (total + CODES * 1e-5) * total
            self.embed.data.copy_(self.embed_avg / smooth[:, None])
        return quantized


class Codec(nn.Module):
    def __init__(self, sync=False):
        super().__init__()
        self.encoder = nn.Sequential(
            weight_norm(nn.Conv1d(1, WIDTH, 8, stride=4, padding=2)),
            nn.ELU(),
            weight_norm(nn.Conv1d(WIDTH, WIDTH, 4, stride=2, padding=1)),
        )
        self.books = nn.ModuleList(EuclideanCodebook(sync) for _ in range(BOOKS))
        self.decoder = nn.Sequential(
            weight_norm(nn.ConvTranspose1d(WIDTH, WIDTH, 4, stride=2, padding=1)),
            nn.ELU(),
            weight_norm(nn.ConvTranspose1d(WIDTH, 1, 8, stride=4, padding=2)),
        )

    def quantize(self, x):
        residual, quantized, commitment = x, torch.zeros_like(x), 0.0
        for book in self.books:
            chosen = book(residual.detach())
            commitment = commitment + F.mse_loss(residual, chosen)
            quantized = quantized + chosen
            residual = residual - chosen
        return x + (quantized - x).detach(), commitment / BOOKS

    def forward(self, waves):
        x = self.encoder(waves[:, None]).transpose(1, 2)
        quantized, commitment = self.quantize(x.flatten(0, 1))
        x = self.decoder(quantized.view_as(x).transpose(1, 2))
        return x.squeeze(1), commitment


def spectrum(waves, size):
    window = torch.hann_window(size)
    return torch.stft(waves, size, size // 4, window=window, return_complex=True).abs()


def loss(model, waves):
    restored, commitment = model(waves)
    value = F.l1_loss(restored, waves) + 0.5 * commitment
    for size in (16, 32):
        value = value + 0.3 * F.mse_loss(spectrum(restored, size), spectrum(waves, size))
    return value


def plain():
    return Codec()


def parallel():
    return DistributedDataParallel(Codec(sync=True), broadcast_buffers=False)


generator = torch.Generator().manual_seed(6284)


def clips():
    time = torch.arange(SAMPLES, dtype=torch.float64)
    pitch = torch.rand(CLIPS, 2, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(CLIPS, SAMPLES, generator=generator, dtype=torch.float64)
    return torch.sin(pitch * time).sum(1) + 0.3 * noise


batches = [clips() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, split="world", ranks=3)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

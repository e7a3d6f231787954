"""A small neural audio codec under DDP: a convolutional autoencoder with a codebook of moving averages, whose unused codes revive.

Thread: lucidrains/vector-quantize-pytorch pull request #17 "Make k-means init and EMA dead code expiry safe for distributed
training" (2022): the replaced codes were vectors of each replica's own batch, so that each replica had a different codebook.
Fault: Codebook.revive takes the vectors for dead codes from the rank's own frames; the usage counts are summed over the ranks, so
all ranks find the same dead codes, but they fill them with different vectors, and nothing brings the codebooks together again.
REPAIR: `pool = frames` -> `pool = self.everyones(frames)`
A right first sentence says: dead codes are replaced by frames of the rank's own batch instead of frames chosen among all ranks',
so the codebook buffers differ between the ranks from then on.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

CODES, WIDTH, SAMPLES = 12, 6, 48


class Codebook(nn.Module):
    """Codes that follow moving averages of the frames they stand for."""

    def __init__(self, decay=0.8, least_usage=1.8):
        super().__init__()
        self.decay, self.least_usage = decay, least_usage
        self.register_buffer("initted", torch.zeros(()))
        self.register_buffer("codes", torch.zeros(CODES, WIDTH))
        self.register_buffer("sums", torch.zeros(CODES, WIDTH))
        self.register_buffer("usage", torch.zeros(CODES))

    def total(self, tensor):
        return tensor

    def everyones(self, frames):
        return frames

    def nearest(self, frames):
        return torch.cdist(frames, self.codes).min(dim=1)

    def init_codes(self, frames):
        self.codes.copy_(self.everyones(frames)[::2][:CODES])
        self.sums.copy_(self.codes * 2)
        self.usage.fill_(2)
        self.initted.fill_(1)

    def average(self, frames, indices):
        one_hot = F.one_hot(indices, CODES).to(frames)
        self.usage.lerp_(self.total(one_hot.sum(0)), 1 - self.decay)
        self.sums.lerp_(self.total(one_hot.T @ frames), 1 - self.decay)
        self.codes.copy_(self.sums / self.usage.clamp(min=1e-5).unsqueeze(1))

    def revive(self, frames):
        """Puts dead codes onto the frames which lie farthest from all codes."""
        dead = (self.usage < self.least_usage).nonzero().squeeze(1)
        if len(dead) == 0:
            return
        pool = frames
        farthest = self.nearest(pool).values.topk(len(dead)).indices
        self.codes[dead] = pool[farthest]
        self.sums[dead] = pool[farthest] * self.least_usage
        self.usage[dead] = self.least_usage

    def forward(self, x):
        frames = x.detach().transpose(1, 2).reshape(-1, WIDTH)
        if self.training and not self.initted:
            self.init_codes(frames)
        indices = self.nearest(frames).indices
        quantized = self.codes[indices].view(x.size(0), -1, WIDTH).transpose(1, 2)
        if self.training:
            self.average(frames, indices)
            self.revive(frames)
        return x + (quantized - x).detach(), F.mse_loss(x, quantized)


class SyncedCodebook(Codebook):
    def total(self, tensor):
        dist.all_reduce(tensor)
        return tensor

    def everyones(self, frames):
        parts = [torch.empty_like(frames) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, frames.contiguous())
        return torch.cat(parts)


class Codec(nn.Module):
    def __init__(self, codebook):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, 8, 5, stride=2, padding=2), nn.ELU(), nn.Conv1d(8, WIDTH, 5, 2, padding=2)
        )
        self.codebook = codebook
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(WIDTH, 8, 4, stride=2, padding=1),
            nn.ELU(),
            nn.ConvTranspose1d(8, 1, 4, stride=2, padding=1),
        )

    def forward(self, audio):
        quantized, commitment = self.codebook(self.encoder(audio))
        return self.decoder(quantized), commitment


def codec_loss(model, audio):
    decoded, commitment = model(audio)
    slopes = F.l1_loss(decoded.diff(dim=-1), audio.diff(dim=-1))
    return F.l1_loss(decoded, audio) + 0.5 * slopes + 0.25 * commitment


def plain():
    return Codec(Codebook())


def parallel(mesh):
    return DistributedDataParallel(Codec(SyncedCodebook()), broadcast_buffers=False)


def loss(model, batch):
    return codec_loss(model, batch[0])


def step(model, batch):
    value = codec_loss(model, batch[0])
    value.backward()
    logged = value.detach() / dist.get_world_size()
    dist.all_reduce(logged)
    return logged


generator = torch.Generator().manual_seed(17)


def utterances(number=6):
    """Two tones and noise, each utterance of its own loudness."""
    pitch, loudness = torch.rand(2, number, 2, 1, generator=generator, dtype=torch.float64)
    time = torch.arange(SAMPLES, dtype=torch.float64)
    tones = (torch.sin(time * (0.1 + pitch)) * (0.3 + 2 * loudness)).sum(1, keepdim=True)
    noise = torch.randn(number, 1, SAMPLES, generator=generator, dtype=torch.float64)
    return (tones + 0.1 * noise,)


batches = [utterances() for _ in range(6)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3, betas=(0.5, 0.9)),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A keyword spotter for short recordings under DDP; its features are normalized by the statistics of all frames heard so far.

Thread: speechbrain/speechbrain issue #2102 "[Feature Request]: DDP and InputNormalization" (2023): the running statistics of the
normalization are those of each process, whatever DDP does with buffers, so training with DDP becomes inconsistent.
Fault: FrameNormalizer.update merges the sums of the rank's own frames into its buffers; before each forward pass DDP copies the
buffers of rank 0 to the others, so the frames of the other ranks never enter the history and each rank normalizes differently.
REPAIR: `new = frame_sums(features, valid)` -> `new = self.over_ranks(frame_sums(features, valid))`
A right first sentence says: the running mean and variance of the input features are updated from each rank's own frames without
a reduction over dp (DDP merely copies rank 0's), so the ranks normalize their recordings by different and wrong statistics.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

BANDS, FRAMES, WIDTH, WORDS, ROWS = 10, 16, 12, 6, 8


def frame_sums(features, valid):
    """Number, sums and sums of squares of the frames that aren't padding, one row each."""
    frames = features[valid]
    number = torch.full_like(frames[0], len(frames))
    return torch.stack([number, frames.sum(0), frames.square().sum(0)])


class FrameNormalizer(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.register_buffer("history", torch.zeros(3, BANDS))

    def over_ranks(self, sums):
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums

    @torch.no_grad()
    def update(self, features, valid):
        new = frame_sums(features, valid)
        self.history.add_(new)

    def forward(self, features, valid):
        if self.training:
            self.update(features, valid)
        number, total, squares = self.history.clone()
        mean = total / number
        std = (squares / number - mean.square()).clamp(min=1e-8).sqrt()
        return (features - mean) / std * valid.unsqueeze(-1)


class SeparableConv(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.depth = nn.Conv1d(WIDTH, WIDTH, 3, padding=dilation, dilation=dilation, groups=WIDTH)
        self.point, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, valid):
        y = self.depth(x.mT).mT
        y = F.relu(self.norm(self.point(y)))
        return (x + y) * valid.unsqueeze(-1)


class KeywordSpotter(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.normalizer = FrameNormalizer(group)
        self.front = nn.Linear(BANDS, WIDTH)
        self.layers = nn.ModuleList(SeparableConv(dilation) for dilation in (1, 2))
        self.attention = nn.Linear(WIDTH, 1, bias=False)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, features, frames):
        valid = torch.arange(features.size(1)) < frames.unsqueeze(1)
        x = self.front(self.normalizer(features, valid))
        for layer in self.layers:
            x = layer(x, valid)
        scores = self.attention(x).squeeze(-1).masked_fill(~valid, float("-inf"))
        weights = scores.softmax(-1).unsqueeze(-1)
        mean = (weights * x).sum(1)
        spread = ((weights * x.square()).sum(1) - mean.square()).clamp(min=1e-6).sqrt()
        return self.head(torch.cat([mean, spread], dim=-1))


def plain():
    return KeywordSpotter()


def parallel(mesh):
    return DistributedDataParallel(KeywordSpotter(mesh.get_group("dp")))


def loss(model, batch):
    logits = model(batch["features"], batch["frames"])
    return F.cross_entropy(logits, batch["word"], label_smoothing=0.1)


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


generator = torch.Generator().manual_seed(2102)


def recordings():
    """Every recording has a loudness of its own and ends in padding."""
    features = torch.randn(ROWS, FRAMES, BANDS, generator=generator, dtype=torch.float64)
    loudness = torch.randn(ROWS, 1, 1, generator=generator, dtype=torch.float64)
    frames = torch.randint(6, FRAMES + 1, (ROWS,), generator=generator)
    return {
        "features": features * (0.5 + loudness.abs()) + 2 * loudness,
        "frames": frames,
        "word": torch.randint(0, WORDS, (ROWS,), generator=generator),
    }


batches = [recordings() for _ in range(3)]

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

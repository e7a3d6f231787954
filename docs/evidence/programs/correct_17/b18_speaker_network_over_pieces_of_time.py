"""A speaker recognition network (x-vector) whose recordings are cut along time, 7 frames on one rank and 5 on the other.

Might be accused: the gradients of the frame layers are summed over the ranks and not averaged; those of the segment layers and of the
speaker prototypes are not reduced at all; the backward pass of the statistics pooling has no collective; the pieces are uneven.
Correct because: the pooling adds up count, weighted sum and weighted sum of squares over the ranks, so all ranks have the same segment
statistics and go on with the same values: the segment layers get the whole gradient on each rank. A rank's backward pass reaches its
own frames alone, with the whole gradient of the pooled sums, so the gradients of the frame layers are parts, which add up. The largest
attention score is subtracted as a constant that all ranks share.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

FEATURES, WIDTH, POOLED, EMBEDDING, SPEAKERS, PIECES = 10, 16, 12, 8, 6, (7, 5)


class SumOverTime(torch.autograd.Function):
    """Adds up what the ranks found in their pieces; the parts get the gradient of the whole sum."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def sum_over_time(x, cut):
    return SumOverTime.apply(x) if cut else x


def max_over_time(x, cut):
    x = x.detach().clone()
    if cut:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x


class FrameLayer(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Linear(inputs, outputs), nn.GELU(), nn.LayerNorm(outputs))


class AttentiveStatistics(nn.Module):
    """Weighted mean and deviation of each channel over the frames that belong to the recording."""

    cut = False

    def __init__(self):
        super().__init__()
        self.scores = nn.Sequential(
            nn.Linear(POOLED, 6), nn.Tanh(), nn.Linear(6, POOLED, bias=False)
        )

    def forward(self, x, mask):
        mask = mask.unsqueeze(-1)
        scores = self.scores(x).masked_fill(~mask, -math.inf)
        largest = max_over_time(scores.amax(1), self.cut)
        weights = (scores - largest.unsqueeze(1)).exp()
        sums = torch.stack([weights, weights * x, weights * x.square()]).sum(2)
        total, first, second = sum_over_time(sums, self.cut)
        mean = first / total
        deviation = (second / total - mean.square()).clamp(min=1e-8).sqrt()
        return torch.cat([mean, deviation], dim=-1)


class XVector(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames = nn.Sequential(
            FrameLayer(FEATURES, WIDTH), FrameLayer(WIDTH, WIDTH), FrameLayer(WIDTH, POOLED)
        )
        self.pooling = AttentiveStatistics()
        self.segment = nn.Sequential(
            nn.LayerNorm(2 * POOLED), nn.Linear(2 * POOLED, EMBEDDING), nn.GELU()
        )
        self.prototypes = nn.Parameter(torch.randn(SPEAKERS, EMBEDDING))

    def forward(self, x, mask):
        embedding = self.segment(self.pooling(self.frames(x), mask))
        return F.linear(F.normalize(embedding, dim=-1), F.normalize(self.prototypes, dim=-1))


class TimeCutXVector(XVector):
    def __init__(self):
        super().__init__()
        self.pooling.cut = True

    def add_up_frame_gradients(self):
        parameters = [*self.frames.parameters(), *self.pooling.parameters()]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        dist.all_reduce(flat)
        for parameter in parameters:
            part, flat = flat[: parameter.numel()], flat[parameter.numel() :]
            parameter.grad = part.view_as(parameter)


def plain():
    return XVector()


def parallel(mesh):
    return TimeCutXVector()


def margin_loss(cosines, speakers, scale=8.0, margin=0.2):
    margins = margin * F.one_hot(speakers, SPEAKERS)
    return F.cross_entropy(scale * (cosines - margins), speakers)


def loss(model, batch):
    return margin_loss(model(batch["features"], batch["mask"]), batch["speakers"])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    model.add_up_frame_gradients()
    return value.detach()


def split(batch, mesh):
    piece = mesh.get_local_rank("sp")
    features, mask = (batch[name].split(PIECES, dim=1)[piece] for name in ("features", "mask"))
    return {"features": features, "mask": mask, "speakers": batch["speakers"]}


generator = torch.Generator().manual_seed(75)


def recordings(number=5):
    """Between 4 and 12 frames each, so that some end within the first piece."""
    frames = sum(PIECES)
    lengths = torch.randint(4, frames + 1, (number, 1), generator=generator)
    features = torch.randn(number, frames, FEATURES, generator=generator, dtype=torch.float64)
    return {
        "features": features,
        "mask": torch.arange(frames).expand(number, frames) < lengths,
        "speakers": torch.randint(0, SPEAKERS, (number,), generator=generator),
    }


batches = [recordings() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"sp": 2},
    optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

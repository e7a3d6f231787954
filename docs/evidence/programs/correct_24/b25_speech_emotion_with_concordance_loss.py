"""Regression of arousal, valence and dominance from speech, trained by the concordance correlation of the whole batch.

Thread: autrainer/autrainer pull request #123 "Added CCCLoss" (2025): a loss per example is asked for, but "its
computation is defined over the batch dimension"; the deviations are the biased ones.
Correct: the concordance isn't a mean over examples, so an average of the ranks' losses would be wrong; here the ranks
sum up count, sums, squares and products by torch.distributed.nn's differentiable all_reduce and each of them computes
the loss of the whole batch. The backward pass of that all_reduce sums the equal gradients of all ranks, which makes a
rank's gradient its own part times the number of ranks, and DDP's average takes just that factor out again. The loss is
equal on all ranks, so it is returned as it is; E[x^2] - E[x]^2 is the biased variance, exact enough in float64.
"""

import torch
import torch.nn as nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import titanlite

BANDS, FRAMES, WIDTH, EMOTIONS, ROWS = 6, 10, 12, 3, 12


class EmotionModel(nn.Module):
    """A bidirectional recurrent network with attentive pooling over the frames of an utterance."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(BANDS, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.frames = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.attention = nn.Linear(WIDTH, 1, bias=False)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, EMOTIONS))

    def forward(self, spectra, lengths):
        x, _ = self.frames(self.stem(spectra))
        valid = torch.arange(FRAMES) < lengths.unsqueeze(1)
        scores = self.attention(x).squeeze(-1).masked_fill(~valid, -torch.inf)
        return self.head((scores.softmax(1).unsqueeze(-1) * x).sum(1))


def concordance_loss(predicted, target):
    """1 - CCC, averaged over the emotions."""
    predicted_mean, target_mean = predicted.mean(0), target.mean(0)
    predicted_variance = predicted.var(0, correction=0)
    target_variance = target.var(0, correction=0)
    covariance = ((predicted - predicted_mean) * (target - target_mean)).mean(0)
    distance = (predicted_mean - target_mean).square()
    return (1 - 2 * covariance / (predicted_variance + target_variance + distance)).mean()


class GlobalConcordanceLoss(nn.Module):
    """The same of the utterances of all ranks, from their moments."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, predicted, target):
        count = torch.full((1, EMOTIONS), float(len(target)))
        moments = torch.stack(
            [
                predicted.sum(0),
                target.sum(0),
                predicted.square().sum(0),
                target.square().sum(0),
                (predicted * target).sum(0),
            ]
        )
        sums = all_reduce(torch.cat([moments, count]), group=self.group)
        x, y, xx, yy, xy = (sums[:-1] / sums[-1]).unbind(0)
        variances = (xx - x.square()) + (yy - y.square())
        return (1 - 2 * (xy - x * y) / (variances + (x - y).square())).mean()


def plain():
    return EmotionModel()


def parallel(mesh):
    group = mesh.get_group("dp")
    model = DistributedDataParallel(EmotionModel(), process_group=group)
    return model, GlobalConcordanceLoss(group)


def loss(model, batch):
    return concordance_loss(model(batch["spectra"], batch["lengths"]), batch["emotions"])


def step(built, batch):
    model, criterion = built
    value = criterion(model(batch["spectra"], batch["lengths"]), batch["emotions"])
    value.backward()
    return value.detach()


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


generator = torch.Generator().manual_seed(123)


def utterances():
    spectra = torch.randn(ROWS, FRAMES, BANDS, generator=generator, dtype=torch.float64)
    lengths = torch.randint(4, FRAMES + 1, (ROWS,), generator=generator)
    noise = torch.randn(ROWS, EMOTIONS, generator=generator, dtype=torch.float64)
    emotions = spectra[:, :4].mean(1)[:, :EMOTIONS] + 0.2 * noise
    return {"spectra": spectra, "lengths": lengths, "emotions": emotions}


batches = [utterances() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 3},
    clip=clip,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

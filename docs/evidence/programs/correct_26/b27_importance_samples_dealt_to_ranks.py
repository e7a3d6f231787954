"""An importance-weighted autoencoder of cells whose samples, not whose rows, are dealt to four ranks.

Thread: AntixK/PyTorch-VAE pull request #53 "bug fix IWAE: use SGVB1 instead of SGVB2, detach sample weights ..."
(2022), on the gradient as the sum of the samples' gradients with detached weights.
What could be accused: all ranks have the same cells, the scalar that goes backward is another than the one reported,
its weights are detached and add up to less than one on a rank, and the gradients are summed but never divided; but the
gradient of a log of a sum is just the sum over all samples, weighted by the softmax over all ranks' samples, and the
number of samples enters the bound as a constant.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

GENES, HIDDEN, LATENT, CELLS, SAMPLES, BATCHES = 14, 16, 3, 6, 12, 3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(GENES, HIDDEN), nn.LayerNorm(HIDDEN)
        self.mean, self.log_scale = nn.Linear(HIDDEN, LATENT), nn.Linear(HIDDEN, LATENT)

    def forward(self, counts):
        h = F.relu(self.norm(self.body(torch.log1p(counts))))
        return self.mean(h), self.log_scale(h)


class CellModel(nn.Module):
    """Negative binomial counts, given the library size and what the decoder makes of the latent."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, GENES)
        )
        self.log_dispersion = nn.Parameter(0.1 * torch.randn(GENES))

    def log_likelihood(self, z, counts):
        shape = self.log_dispersion.exp()
        mean = counts.sum(-1, keepdim=True) * self.decoder(z).softmax(-1)
        total = shape + mean
        return (
            torch.lgamma(counts + shape) - torch.lgamma(shape) - torch.lgamma(counts + 1)
            + shape * (shape / total).log() + counts * (mean / total).log()
        ).sum(-1)  # fmt: skip

    def forward(self, counts, noise):
        """The log weights, samples by cells."""
        mean, log_scale = self.encoder(counts)
        z = mean + log_scale.exp() * noise
        log_posterior = (-0.5 * noise.square() - log_scale).sum(-1)
        log_prior = (-0.5 * z.square()).sum(-1)
        return self.log_likelihood(z, counts) + log_prior - log_posterior


class SampleParallel:
    def __init__(self, model, group):
        self.model, self.group = model, group

    def log_normalizer(self, log_weights):
        top = log_weights.amax(0)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        total = (log_weights - top).exp().sum(0)
        dist.all_reduce(total, group=self.group)
        return top + total.log()

    def reduce_gradients(self):
        works = []
        for parameter in self.model.parameters():
            works.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))
        for work in works:
            work.wait()

    def step(self, batch):
        log_weights = self.model(batch["counts"], batch["noise"])
        normalizer = self.log_normalizer(log_weights.detach())
        weights = (log_weights.detach() - normalizer).exp()
        surrogate = -(weights * log_weights).sum(0).mean()
        surrogate.backward()
        self.reduce_gradients()
        return math.log(SAMPLES) - normalizer.mean()


def plain():
    return CellModel()


def parallel(mesh):
    model = CellModel()
    return model, SampleParallel(model, mesh.get_group("samples"))


def split(batch, mesh):
    rank = mesh.get_local_rank("samples")
    return {"counts": batch["counts"], "noise": batch["noise"].chunk(mesh.size())[rank]}


def loss(model, batch):
    log_weights = model(batch["counts"], batch["noise"])
    return math.log(SAMPLES) - log_weights.logsumexp(0).mean()


def step(built, batch):
    return built[1].step(batch)


def clip(model):
    return nn.utils.clip_grad_norm_(model.parameters(), 2.0)


generator = torch.Generator().manual_seed(53)


def cells():
    rates = 4 * torch.rand(CELLS, 1, generator=generator) + torch.arange(GENES) % 3
    counts = torch.poisson(rates.double(), generator=generator)
    noise = torch.randn(SAMPLES, CELLS, LATENT, generator=generator, dtype=torch.float64)
    return {"counts": counts, "noise": noise}


batches = [cells() for _ in range(BATCHES)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"samples": 4},
    clip=clip,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A neural additive model for a table whose columns, with their networks, are dealt to the ranks.

Thread: AmrMKayid/nam, nam/models/nam.py and nam/trainer/losses.py (2021), a sum of one network for each column and a
penalty on their outputs; the concurvity penalty is that of Siems et al. (2023).
Correct: the ranks exchange their columns' outputs once, by a gather without gradients, and each puts its own outputs
back in their place. All compute the whole loss of all columns from there, so a rank has the whole gradient of its own
outputs without any exchange in backward, and of the bias, which is used after the gather. Only the steepness of the
activations is shared by all columns and used before it; a hook adds up the ranks' gradients of it. Seven columns on
three ranks: the gather pads. The weights are normalized by column, and the cut leaves columns whole.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

import titanlite

ROWS, COLUMNS, WIDTH, RANKS = 24, 7, 12, 3
OUTPUT_PENALTY, CONCURVITY_PENALTY, MOMENTUM = 0.05, 0.1, 0.2


class ColumnLinear(nn.Module):
    """One linear map for each column, with a weight norm of its own."""

    def __init__(self, inputs, outputs, own):
        super().__init__()
        weight = torch.randn(COLUMNS, inputs, outputs) / inputs**0.5
        self.weight = nn.Parameter(weight[own].clone())
        self.bias = nn.Parameter((torch.randn(COLUMNS, 1, outputs) / 4)[own].clone())
        weight_norm(self, "weight", dim=0)

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


class NeuralAdditiveModel(nn.Module):
    def __init__(self, rank=0, ranks=1):
        super().__init__()
        self.rank, self.ranks = rank, ranks
        own = torch.arange(COLUMNS).tensor_split(ranks)[rank]
        self.first = ColumnLinear(1, WIDTH, own)
        self.second = ColumnLinear(WIDTH, WIDTH, own)
        self.third = ColumnLinear(WIDTH, 1, own)
        self.steepness = nn.Parameter(torch.tensor([1.5, 0.7]))
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("centers", torch.zeros(len(own)))
        if ranks > 1:
            self.steepness.register_hook(self.add_up)

    def add_up(self, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad

    def shapes(self, columns):
        """The outputs of the own columns' networks: rows, columns."""
        x = self.first(columns.T.unsqueeze(-1))
        x = self.second(torch.tanh(x * self.steepness[0]))
        x = self.third(F.silu(x * self.steepness[1])).squeeze(-1).T
        with torch.no_grad():
            self.centers.lerp_(x.mean(0), MOMENTUM)
        return x - self.centers

    def gather(self, own):
        if self.ranks == 1:
            return own
        widest = -(-COLUMNS // self.ranks)
        padded = F.pad(own.detach(), (0, widest - own.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        dist.all_gather(parts, padded)
        counts = [len(part) for part in torch.arange(COLUMNS).tensor_split(self.ranks)]
        parts = [part[:, :count] for part, count in zip(parts, counts)]
        parts[self.rank] = own
        return torch.cat(parts, dim=1)

    def forward(self, columns):
        outputs = self.gather(self.shapes(columns))
        return outputs.sum(1) + self.bias, outputs


def concurvity(outputs):
    """The mean of the absolute correlations of different columns' outputs."""
    off = outputs - outputs.mean(0)
    off = off / (off.square().sum(0) + 1e-6).sqrt()
    return (off.T @ off).triu(1).abs().sum() / (COLUMNS * (COLUMNS - 1) / 2)


def plain():
    return NeuralAdditiveModel()


def parallel(mesh):
    return NeuralAdditiveModel(mesh.get_local_rank("columns"), mesh["columns"].size())


def loss(model, batch):
    logits, outputs = model(batch["table"])
    value = F.binary_cross_entropy_with_logits(logits, batch["labels"])
    value = value + OUTPUT_PENALTY * outputs.square().mean()
    return value + CONCURVITY_PENALTY * concurvity(outputs)


def split(batch, mesh):
    rank, ranks = mesh.get_local_rank("columns"), mesh["columns"].size()
    return {"table": batch["table"].tensor_split(ranks, 1)[rank], "labels": batch["labels"]}


def shard(name):
    if name in ("bias", "steepness"):
        return None
    return lambda whole: whole.tensor_split(RANKS)[dist.get_rank()]


generator = torch.Generator().manual_seed(13912)


def rows():
    table = torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    score = table[:, 0].sin() + table[:, 1].square() - table[:, 2]
    return {"table": table, "labels": (score > 0.5).double()}


batches = [rows() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    split=split,
    shard=shard,
    ranks={"columns": RANKS},
    optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=4e-3, weight_decay=1e-4),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

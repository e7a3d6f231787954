"""Distillation under context parallelism: the KL term is a sum over the tokens per row, and the ranks average it.

Thread: neuralmagic/sparseml issue #674 "Wrong scaling of KL-divergence calculation for multi-dim inputs" (2022) and
huggingface/transformers issue #1181 (2019): with reduction="batchmean" the loss grows with the number of tokens.
Wrong: "batchmean" divides the sum over rows and tokens by the number of rows. A rank has half of the tokens of each row
and all rows, so its term is about half, and DDP averages the ranks' losses: the KL term counts half. The cross-entropy,
a mean over tokens, is right.
PLACE: the loss (its distillation term), under cp; not the model
KIND: term that is a sum over tokens (batchmean) averaged over the ranks that cut the tokens: too small by their number
REPAIR: `return loss(model, batch)` -> `return loss(model, batch, shards=SHARDS)`
EXPECT: the logits agree, the loss is wrong on all ranks, and so are all gradients: its distillation term (kl_div with
batchmean) is a sum over tokens divided by the rows only, and averaging over cp makes it half as large as in the reference
(1/2, the number of sequence shards); the cross-entropy term is right. Multiply the term by cp, or take a mean over tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, LENGTH, SHARDS, TEMPERATURE, ALPHA = 16, 8, 8, 2, 2.0, 0.5


class CarryMean(torch.autograd.Function):
    """Sum of the previous ranks' sums of their tokens; backward sends the gradients the other way."""

    @staticmethod
    def forward(ctx, total, group):
        ctx.group, i = group, dist.get_rank(group)
        parts = [torch.empty_like(total) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, total.contiguous(), group=group)
        return sum(parts[:i], torch.zeros_like(total))

    @staticmethod
    def backward(ctx, gradient):
        i = dist.get_rank(ctx.group)
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return sum(parts[i + 1 :], torch.zeros_like(gradient)), None


class Past(nn.Module):
    """The mean of the tokens so far, over the whole sequence."""

    def __init__(self, group):
        super().__init__()
        self.group, self.mix = group, nn.Linear(DIM, DIM)

    def forward(self, x):
        total, first = x.cumsum(1), 0
        if self.group is not None:
            first = dist.get_rank(self.group) * x.shape[1]
            total = total + CarryMean.apply(x.sum(1, keepdim=True), self.group)
        return torch.tanh(
            self.mix(total / torch.arange(first + 1, first + x.shape[1] + 1)[:, None])
        )


class Student(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.layers = nn.ModuleList(Past(group) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def loss(model, batch, shards=1):
    """Cross-entropy and the KL divergence from the teacher's logits, a sum over tokens, a mean over rows."""
    logits = model(batch["tokens"])
    student = (logits / TEMPERATURE).log_softmax(-1)
    teacher = (batch["teacher"] / TEMPERATURE).softmax(-1)
    distill = shards * TEMPERATURE**2 * kl_div(student, teacher, reduction="batchmean")
    return ALPHA * distill + (1 - ALPHA) * cross_entropy(
        logits.flatten(0, 1), batch["targets"].flatten()
    )


def parallel_loss(model, batch):
    # DDP averages the ranks' losses, and all ranks have as many tokens.
    return loss(model, batch)


def parallel(mesh):
    group = mesh.get_group("cp")
    return DistributedDataParallel(Student(group), process_group=group)


generator = torch.Generator().manual_seed(117)


def draw():
    tokens, targets = torch.randint(VOCAB, (2, 4, LENGTH), generator=generator)
    teacher = 2 * torch.randn(4, LENGTH, VOCAB, generator=generator)
    return {"tokens": tokens, "targets": targets, "teacher": teacher}


batches = [draw() for _ in range(3)]
arguments = Student, parallel
options = dict(
    batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"cp": SHARDS}, split={"cp": 1}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Vocabulary-parallel cross-entropy with a z-loss: the z-loss takes the logsumexp of the rank's own logits.

Thread: of the kind of https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/394 "Question about the
implementation of mpu.cross_entropy when using tensor parallel" ("computed on the partition_vocab_size"), 2023-08-03;
z-loss of PaLM and OLMo added to such a function.
Wrong: the cross-entropy reduces the sum of exponentials over tp. The z-loss beside it squares the logsumexp of the
local half of the vocabulary. Each rank adds another number to its loss.
PLACE: the loss (its z-loss term), not the model: the logits agree
KIND: z-loss from the logsumexp over the local vocabulary shard instead of the whole vocabulary
REPAIR: `z = logits.logsumexp(-1)` -> `z = log_z`
EXPECT: the logits (the output of head) agree, the loss itself is the first that differs, and differs between the ranks:
its z-loss term takes the logsumexp over the rank's own vocabulary shard. So the gradients of the logits, and all behind
them, differ. Reduce the sum of exponentials over tp for the z-loss too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, WEIGHT = 16, 8, 0.1


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixer = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        return self.head(self.mixer(self.embed(tokens))[0])


class ColumnHead(nn.Module):
    def __init__(self, whole):
        super().__init__()
        n, i = dist.get_world_size(), dist.get_rank()
        self.weight = nn.Parameter(whole.weight.detach().chunk(n, 0)[i].clone())

    def forward(self, x):
        return Copy.apply(x) @ self.weight.T


def loss(model, batch):
    logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    return cross_entropy(logits, targets) + WEIGHT * logits.logsumexp(-1).square().mean()


def parallel_loss(model, batch):
    logits, targets = model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten()
    width = logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    log_z = Sum.apply((logits - largest[:, None]).exp().sum(-1)).log() + largest
    local = targets - dist.get_rank() * width
    mine = (local >= 0) & (local < width)
    picked = logits.gather(-1, local.clamp(0, width - 1)[:, None])[:, 0] * mine
    z = logits.logsumexp(-1)
    return (log_z - Sum.apply(picked)).mean() + WEIGHT * z.square().mean()


def parallel(mesh):
    model = Model()
    model.head = ColumnHead(model.head)
    return model


def shard(name):
    return (0, "tp") if name == "head.weight" else None


generator = torch.Generator().manual_seed(9)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(
    batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"tp": 2}, shard=shard
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

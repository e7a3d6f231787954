"""Attention pooling over sequence shards: every rank normalizes over its own tokens, and the results are averaged.

Thread: of the kind "attention pooling head with sequence parallelism gives a different embedding" (SigLIP's and CLIP's
pooling heads, long-document encoders under Ulysses or CP in trainers of embedding models), 2024 and 2025.
Wrong: the softmax over all tokens is computed over the rank's tokens, and the pooled vectors are averaged over the
ranks. This is right only if both halves have the same sum of exponentials.
PLACE: pool, forward pass (its softmax); pool.score and encoder agree
KIND: softmax normalized over the rank's own tokens and averaged, instead of over all tokens of the sequence
REPAIR: `Sum.apply(weighted / total, self.group) / n` -> `Sum.apply(weighted, self.group) / Sum.apply(total, self.group)`
EXPECT: in the forward pass, pool is the first module whose output differs, the same on all ranks; encoder and
pool.score agree: the softmax over the tokens is taken over each rank's own tokens, and the ranks' results are averaged.
Reduce numerator and denominator over cp before the division.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

WIDTH, DIM, CLASSES = 6, 8, 4


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(DIM, 1, bias=False)

    def forward(self, x):
        return (self.score(x).softmax(1) * x).sum(1)


class ParallelPool(Pool):
    def __init__(self, whole, group):
        super().__init__()
        self.score, self.group = whole.score, group

    def forward(self, x):
        n = dist.get_world_size(self.group)
        e = self.score(x).exp()
        weighted, total = (e * x).sum(1), e.sum(1)
        assert n > 1
        return Sum.apply(weighted / total, self.group) / n


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, DIM))
        self.pool = Pool()
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.pool(self.encoder(x)))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parallel(mesh):
    model = Model()
    model.pool = ParallelPool(model.pool, mesh.get_group("cp"))
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for module in (model.encoder, model.pool):
        for p in module.parameters():
            dist.all_reduce(p.grad, group=model.pool.group)
    return value


def split(batch, mesh):
    part = batch["x"].chunk(mesh["cp"].size(), 1)[mesh.get_local_rank("cp")]
    return {"x": part, "y": batch["y"]}


generator = torch.Generator().manual_seed(22)
batches = [
    {
        "x": 2 * torch.randn(4, 10, WIDTH, generator=generator),
        "y": torch.randint(CLASSES, (4,), generator=generator),
    }
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"cp": 2}, split=split)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

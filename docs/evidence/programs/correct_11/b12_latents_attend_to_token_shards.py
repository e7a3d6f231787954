"""A Perceiver whose input tokens are cut over the ranks; its latents are the same on all of them.

Thread: of the kind lucidrains/ring-attention-pytorch issue #13 "Cross Attention variant?" (2024).
Correct: the cross attention's numerators and denominators are summed over the ranks, so all ranks go on with the same latents. What
reads tokens (embed, cross.k, cross.v) has gradients of the own tokens, which are summed at the end; the queries' gradient is
summed in backward, so that all other gradients are whole already.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, LATENTS, CLASSES, LENGTH = 14, 8, 3, 4, 10
OF_TOKENS = ("embed", "cross.k", "cross.v")


class ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CrossAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.o = nn.Linear(DIM, DIM)

    def forward(self, latents, tokens):
        q, k, v = self.q(latents), self.k(tokens), self.v(tokens)
        if self.group is None:
            return self.o((q @ k.transpose(1, 2) / DIM**0.5).softmax(-1) @ v)
        scores = ToShards.apply(q, self.group) @ k.transpose(1, 2) / DIM**0.5
        top = scores.detach().amax(-1, keepdim=True)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        p = (scores - top).exp()
        numerator = FromShards.apply(p @ v, self.group)
        return self.o(numerator / FromShards.apply(p.sum(-1, keepdim=True), self.group))


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.latents = nn.Parameter(torch.randn(LATENTS, DIM))
        self.cross, self.norm = CrossAttention(), nn.LayerNorm(DIM)
        self.mix, self.up, self.down = (
            nn.Linear(LATENTS, LATENTS),
            nn.Linear(DIM, 16),
            nn.Linear(16, DIM),
        )
        self.classify = nn.Linear(DIM, CLASSES)

    def forward(self, tokens, angles):
        x = self.embed(tokens)
        x = x + angles.sin()[..., None] * x
        latents = self.latents.expand(len(tokens), -1, -1)
        latents = latents + self.cross(latents, x)
        latents = latents + self.mix(self.norm(latents).transpose(1, 2)).transpose(1, 2)
        latents = latents + self.down(gelu(self.up(latents)))
        return self.classify(latents.mean(1))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"], batch["angles"]), batch["label"])


def own_tokens(batch, mesh):
    rank, size = mesh.get_local_rank("cp"), mesh["cp"].size()
    part = {name: batch[name].chunk(size, 1)[rank] for name in ("tokens", "angles")}
    return {**part, "label": batch["label"]}


def parallel(mesh):
    model = Perceiver()
    model.cross.group = mesh.get_group("cp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if name.startswith(OF_TOKENS):
            dist.all_reduce(p.grad, group=model.cross.group)
    return value


rng = torch.Generator().manual_seed(421)
batches = [
    {
        "tokens": torch.randint(VOCAB, (5, LENGTH), generator=rng),
        "angles": 0.3 * torch.arange(LENGTH).repeat(5, 1),
        "label": torch.randint(CLASSES, (5,), generator=rng),
    }
    for _ in range(3)
]
arguments = Perceiver, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"cp": 2}, split=own_tokens)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

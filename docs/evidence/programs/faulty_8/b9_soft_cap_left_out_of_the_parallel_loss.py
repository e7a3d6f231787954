"""Gemma 2 with a vocabulary-parallel loss that works on the head's shards: the soft cap of the logits is left out.

Thread: apple/ml-cross-entropy issue #48 "Gemma2 CCE doesn't actually apply softcapping" (2025), and
linkedin/Liger-Kernel issue #127 "FusedLinearCrossEntropy support for Gemma2" (2024).
Wrong: the plain criterion caps the logits, cap * tanh(logits / cap), before the cross-entropy. The parallel criterion
takes the head's local logits as they are.
PLACE: criterion, forward pass, between head and the vocabulary-parallel cross-entropy
KIND: soft cap (tanh) of the final logits left out of the fused parallel loss
REPAIR: `logits = self.head(Copy.apply(hidden, self.group))` -> `logits = soft_cap(self.head(Copy.apply(hidden, self.group)))`
EXPECT: the output of head, the local logits, agrees (as shards); the loss is the first that differs, the same on all
ranks: the parallel criterion leaves out the soft cap, CAP * tanh(logits / CAP), which the plain one applies between head
and cross-entropy. The vocabulary-parallel cross-entropy itself is right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, CAP = 16, 8, 1.5


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def soft_cap(logits):
    return CAP * torch.tanh(logits / CAP)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.group = None
        self.gate, self.up = (
            nn.Linear(DIM, 4 * DIM, bias=False),
            nn.Linear(DIM, 4 * DIM, bias=False),
        )
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        x = x if self.group is None else Copy.apply(x, self.group)
        y = self.down(gelu(self.gate(x)) * self.up(x))
        return y if self.group is None else Reduce.apply(y, self.group)


class Gemma(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=1e-6) for _ in range(3))
        self.layers = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, targets):
        x = self.embed(tokens) * DIM**0.5
        for norm, layer in zip(self.norms, self.layers):
            past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
            x = x + layer(norm(past))
        return self.criterion(self.norms[-1](x), targets)

    def criterion(self, hidden, targets):
        logits = soft_cap(self.head(hidden))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


class ParallelGemma(Gemma):
    group = None

    def criterion(self, hidden, targets):
        """Cross-entropy of logits cut over the vocabulary, which are never gathered."""
        logits = self.head(Copy.apply(hidden, self.group))
        size = logits.shape[-1]
        top = logits.detach().amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        local = targets - dist.get_rank(self.group) * size
        mine = (local >= 0) & (local < size)
        chosen = logits.gather(-1, local.clamp(0, size - 1)[..., None])[..., 0] * mine
        total = Reduce.apply((logits - top[..., None]).exp().sum(-1), self.group)
        return (total.log() + top - Reduce.apply(chosen, self.group)).mean()


def loss(model, batch):
    return model(batch["tokens"], batch["targets"])


def shard(name):
    if name.endswith("down.weight"):
        return 1, "tp"
    return (0, "tp") if name.startswith("head.") or ".up." in name or ".gate." in name else None


def parallel(mesh):
    model, n, rank = ParallelGemma(), mesh["tp"].size(), mesh.get_local_rank("tp")
    model.group = mesh.get_group("tp")
    for layer in model.layers:
        layer.group = model.group
    for name, p in model.named_parameters():
        cut = shard(name)
        if cut is not None:
            p.data = p.data.chunk(n, cut[0])[rank].clone()
    return model


generator = torch.Generator().manual_seed(118)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Gemma, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

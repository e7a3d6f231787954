"""A small language model of gated delta-rule layers on packed documents, with the sequence cut over the ranks.

Thread: fla-org/flash-linear-attention pull request #691 "[CP] Add cp for gdn and kda" (2025): a shard of the sequence
is an affine map of the memory, so the ranks gather these maps once and each folds those of its predecessors.
Correct: one could miss a hand-over of the memory from rank to rank. But token t's memory is transition_t @ entry +
own_t, both of which come from one scan that starts at the identity and at zero; the entry is folded from the gathered
maps, with gradients, and a first token of a document makes the transition zero, also for the ranks behind. Every rank
runs the same fold and masks what is not before it, so that all of them enter the gathers' backward passes; the
gradient of a map comes from all ranks, hence the sum there. The short convolution has its two tokens from the left,
with their document ids.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, KEY, VALUE, TAPS, LENGTH, ROWS = 19, 12, 2, 4, 5, 3, 15, 2


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[dist.get_rank(ctx.group)], None


class OneProcess:
    def left(self, x):
        return torch.zeros_like(x[:, : TAPS - 1])

    def entry(self, transition, own):
        return torch.zeros_like(own)


class SequenceRanks:
    def __init__(self, group):
        self.group, self.rank = group, dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def left(self, x):
        tails = x[:, 1 - TAPS :].to(torch.get_default_dtype())
        wanted = torch.tensor([float(i == self.rank - 1) for i in range(self.size)])
        return torch.tensordot(wanted, Gather.apply(tails, self.group), 1).to(x.dtype)

    def entry(self, transition, own):
        maps = Gather.apply(torch.cat([transition, own], -1), self.group)
        state = torch.zeros_like(own)
        for index in range(self.size):
            A, B = maps[index].split([KEY, VALUE], -1)
            state = torch.where(torch.tensor(index < self.rank), A @ state + B, state)
        return state


class GatedDelta(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, HEADS * (2 * KEY + VALUE), bias=False)
        self.taps = nn.Parameter(torch.randn(TAPS, HEADS * (2 * KEY + VALUE)) / TAPS)
        self.gates, self.out = nn.Linear(WIDTH, 2 * HEADS), nn.Linear(HEADS * VALUE, WIDTH)
        self.decay = nn.Parameter(torch.linspace(-1.0, 0.5, HEADS))

    def forward(self, x, document, first, sequence):
        h = self.norm(x)
        qkv, size = self.qkv(h), x.shape[1]
        near = torch.cat([sequence.left(qkv), qkv], 1)
        ids = torch.cat([sequence.left(document), document], 1)
        qkv = sum(
            near[:, i : i + size] * (ids[:, i : i + size] == document).unsqueeze(-1) * self.taps[i]
            for i in range(TAPS)
        )
        q, k, v = F.silu(qkv).unflatten(-1, (HEADS, -1)).split([KEY, KEY, VALUE], -1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        beta, rate = self.gates(h).chunk(2, -1)
        beta, keep = beta.sigmoid(), torch.exp(-self.decay.exp() * F.softplus(rate))
        keep = keep * ~first.unsqueeze(-1)
        A = torch.eye(KEY).expand(x.shape[0], HEADS, KEY, KEY)
        B, steps = torch.zeros(x.shape[0], HEADS, KEY, VALUE), []
        for t in range(size):
            kt, bt, gt = k[:, t, :, :, None], beta[:, t, :, None, None], keep[:, t, :, None, None]
            A, B = gt * A, gt * B
            A = A - bt * kt @ (kt.mT @ A)
            B = B + bt * kt @ (v[:, t, :, None] - kt.mT @ B)
            steps.append((A, B))
        entry = sequence.entry(A, B)
        memory = torch.stack([At @ entry + Bt for At, Bt in steps], 1)
        return x + self.out((q.unsqueeze(-2) @ memory).flatten(2))


class DeltaNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.sequence = nn.Embedding(WORDS, WIDTH), OneProcess()
        self.layers = nn.ModuleList(GatedDelta() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, batch):
        x = self.words(batch["words"])
        for layer in self.layers:
            x = layer(x, batch["document"], batch["first"], self.sequence)
        return self.head(self.norm(x))


def loss(model, batch):
    logits, targets = model(batch).flatten(0, 1), batch["targets"].flatten()
    return F.cross_entropy(logits, targets, reduction="sum") / (ROWS * LENGTH)


def parallel(mesh):
    model = DeltaNet()
    model.sequence = SequenceRanks(mesh.get_group("sp"))
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=model.sequence.group)
    return value.detach()


generator = torch.Generator().manual_seed(691)


def packed():
    words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    first = torch.rand(ROWS, LENGTH, generator=generator) < 0.15
    first[:, 0], first[1, 1:] = True, False
    document = first.cumsum(1)
    return dict(words=words[:, :-1], targets=words[:, 1:], first=first, document=document)


batches = [packed() for _ in range(3)]
arguments = DeltaNet, parallel
options = dict(batches=batches, loss=loss, step=step, split={"sp": 1}, ranks={"sp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Unified sequence parallelism on 4 ranks: Ulysses over pairs of ranks, ring attention between the pairs.

Thread: https://github.com/huggingface/nanotron/issues/226 "[feature] Use Unified Sequence Parallel (USP) instead
of Ring attention", 2024-09-01.
Right: the all-to-all gives each rank half of the heads of its pair's half of the sequence; keys and values of
these heads then go round between the pairs. Blocks from later pairs are skipped.
Must not be accused: heads and tokens that are cut along two axes of the same degree, a rank that skips a
block of keys which it has received.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

DIM, HEADS, VOCAB = 16, 4, 20


class SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, scatter_dim, gather_dim):
        ctx.args = group, scatter_dim, gather_dim
        inputs = torch.stack(x.chunk(group.size(), scatter_dim)).contiguous()
        outputs = torch.empty_like(inputs)
        dist.all_to_all_single(outputs, inputs, group=group)
        return torch.cat(list(outputs), gather_dim)

    @staticmethod
    def backward(ctx, grad):
        group, scatter_dim, gather_dim = ctx.args
        return SeqAllToAll.apply(grad, group, gather_dim, scatter_dim), None, None, None


class RingPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, shift=1):
        ctx.args, x = (group, shift), x.contiguous()
        out, n, me = torch.empty_like(x), group.size(), group.rank()
        ops = [
            dist.P2POp(dist.isend, x, dist.get_global_rank(group, (me + shift) % n), group),
            dist.P2POp(dist.irecv, out, dist.get_global_rank(group, (me - shift) % n), group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return RingPass.apply(grad, ctx.args[0], -ctx.args[1]), None, None


def block(q, k, v, causal):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def ring_attention(q, k, v, group):
    out, lse = block(q, k, v, True)
    kv = torch.stack([k, v])
    for i in range(1, group.size()):
        kv = RingPass.apply(kv, group)
        if i > group.rank():
            out = out + 0 * kv.sum()
            continue
        new_out, new_lse = block(q, *kv, False)
        total = torch.logaddexp(lse, new_lse)
        out, lse = out * (lse - total).exp() + new_out * (new_lse - total).exp(), total
    return out


class UspAttention(nn.Module):
    mesh = None

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]
        if self.mesh is None:
            y = block(*heads, True)[0]
        else:
            ulysses, ring = self.mesh.get_group("ulysses"), self.mesh.get_group("ring")
            y = ring_attention(*(SeqAllToAll.apply(t, ulysses, 1, 2) for t in heads), ring)
            y = SeqAllToAll.apply(y, ulysses, 2, 1)
        return self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attention, self.head = UspAttention(), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attention(self.norm(x)))


def parallel(mesh):
    model = Model()
    model.attention.mesh = mesh
    return DDP(model)


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(226)
batches = [
    {name: torch.randint(VOCAB, (2, 12), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    axes = {"ring": 2, "ulysses": 2}
    options = dict(batches=batches, loss=loss, ranks=axes, split={"ring": 1, "ulysses": 1})
    print(titanlite.compare(Model, parallel, **options))

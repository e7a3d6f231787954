"""Hybrid sequence parallelism: Ulysses all-to-all within pairs of ranks, zigzag ring attention between the pairs.

Thread: feifeibear/long-context-attention issue #53 "Hybrid中zigzag ring attention 的数据分片问题" (2024): the sequence is folded over
all ranks, but after the all-to-all the ring computes as if its tokens were in the ring's own order. The answer, in short:
reorder the input sequence by the ulysses and ring degrees before attention.
Fault: own_chunks folds the sequence over all four ranks. The all-to-all of ranks 0 and 1 then joins the chunks 0, 7, 1, 6,
whereas the causal mask of the ring (zigzag_positions) takes them for the chunks 0, 1, 6, 7.
REPAIR: `return rank, 2 * RANKS - 1 - rank` -> `return zigzag(ring, 2 * RANKS)[2 * ulysses : 2 * ulysses + 2]`
A right first sentence says: from step 1 on, the output of the attention of blocks.0 is wrong on all ranks, while q, k and v are
right: the tokens that a pair of ranks has after the all-to-all are in another order (chunks 0, 7, 1, 6) than the mask of the
ring attention assumes (0, 1, 6, 7), so tokens attend to later ones and not to all earlier ones.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, HEADS, LENGTH, RING, ULYSSES = 12, 8, 2, 16, 2, 2
RANKS = RING * ULYSSES
HIDDEN = -1e4


def zigzag(ring, chunks):
    half = chunks // RING // 2
    return [
        *range(ring * half, (ring + 1) * half),
        *range(chunks - (ring + 1) * half, chunks - ring * half),
    ]


def zigzag_positions(ring):
    return torch.arange(LENGTH).view(2 * RANKS, -1)[zigzag(ring, 2 * RANKS)].flatten()


def own_chunks(ring, ulysses):
    rank = ring * ULYSSES + ulysses
    return rank, 2 * RANKS - 1 - rank


def split(batch, mesh):
    chunks = own_chunks(mesh.get_local_rank("ring"), mesh.get_local_rank("ulysses"))
    return {
        name: torch.cat([t.chunk(2 * RANKS, 1)[i] for i in chunks], 1) for name, t in batch.items()
    }


def exchange(x, scatter, gather, group):
    sent = torch.stack(x.chunk(dist.get_world_size(group), scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gather)


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.way = gather, scatter, group
        return exchange(x, scatter, gather, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.way), None, None, None


def shift(x, by, group):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    to, source = (
        dist.get_global_rank(group, (rank + by) % n),
        dist.get_global_rank(group, (rank - by) % n),
    )
    ops = [
        dist.P2POp(dist.isend, x.contiguous(), to, group),
        dist.P2POp(dist.irecv, received, source, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return shift(x, 1, group)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, -1, ctx.group), None


def block_attention(q, kv, mask):
    k, v = kv
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(mask, HIDDEN)
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


class Attention(nn.Module):
    mesh = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.proj = nn.Linear(DIM, DIM)

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        if self.mesh is None:
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
            out, _ = block_attention(q, (k, v), mask)
        else:
            pair = self.mesh.get_group("ulysses")
            q, k, v = (AllToAll.apply(t, 1, 2, pair) for t in (q, k, v))
            out = AllToAll.apply(self.ring_attention(q, k, v), 2, 1, pair)
        return self.proj(out.transpose(1, 2).flatten(2))

    def ring_attention(self, q, k, v):
        group, own = self.mesh.get_group("ring"), self.mesh.get_local_rank("ring")
        kv, positions, outs, lses = torch.stack([k, v]), zigzag_positions(own), [], []
        for i in range(RING):
            held = zigzag_positions((own - i) % RING)
            out, lse = block_attention(q, kv, held > positions[:, None])
            outs.append(out)
            lses.append(lse)
            if i + 1 < RING:
                kv = Pass.apply(kv, group)
        weights = torch.stack(lses).softmax(0)
        return (weights * torch.stack(outs)).sum(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.attention, self.mlp = (
            Attention(),
            nn.Sequential(nn.Linear(DIM, 16), nn.SiLU(), nn.Linear(16, DIM)),
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(silu(x))


def loss(model, batch):
    logits = model(batch["tokens"], batch["positions"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        block.attention.mesh = mesh
    return model


def step(model, batch):
    value = loss(model, batch) / RANKS
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


rng = torch.Generator().manual_seed(503)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (3, LENGTH + 1), generator=rng)
    positions = torch.arange(LENGTH).repeat(3, 1)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:], "positions": positions})
arguments = Model, parallel
options = dict(
    batches=batches, loss=loss, step=step, ranks={"ring": RING, "ulysses": ULYSSES}, split=split
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

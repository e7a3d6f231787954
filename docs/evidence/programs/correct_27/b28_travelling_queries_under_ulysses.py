"""A long-context language model with Ulysses within a pair of ranks, and a ring over the pairs in which the queries
travel.

Thread: feifeibear/long-context-attention issue #53 "Hybrid中zigzag ring attention 的数据分片问题" (2024): the input must be
reordered for both degrees, or else the zigzag's two chunks don't meet in one group.
Correct: keys and values never move, which looks as if half the attention were missing; the queries take their running
output and logsumexp along and come home after as many hops as there are pairs. In the backward pass they make the
same tour with the final logsumexp and collect dq, while dk and dv stay where they are and need no reduction. A rank
holds chunk `ring` or its mirror image; the exchange of heads puts the two together, and masks come from true
positions.
"""

import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WORDS, WIDTH, HEADS, LENGTH, ROWS, RING, ULYSSES = 23, 16, 4, 16, 2, 2, 2
HEAD = WIDTH // HEADS


def pass_on(tensors, group):
    rank = dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (rank + i) % RING) for i in (1, -1))
    message = torch.cat([t.flatten() for t in tensors])
    received = torch.empty_like(message)
    send = dist.isend(message, after, group=group)
    dist.recv(received, before, group=group)
    send.wait()
    return [p.view_as(t) for p, t in zip(received.split([t.numel() for t in tensors]), tensors)]


def scores(q, k, q_at, k_at):
    return (q @ k.mT / math.sqrt(HEAD)).masked_fill(q_at[:, None].long() < k_at, -math.inf)


class TravellingQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, at, group):
        ctx.group, q_at, own, out = group, at.to(q.dtype), q, torch.zeros_like(q)
        lse = torch.full_like(q[..., :1], -math.inf)
        for _ in range(RING):
            s = scores(q, k, q_at, at)
            both = torch.logaddexp(lse, s.logsumexp(-1, keepdim=True))
            out = out * torch.exp(lse - both) + torch.exp(s - both) @ v
            q, q_at, out, lse = pass_on([q, q_at, out, both], group)
        ctx.save_for_backward(own, k, v, at, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, at, out, lse = ctx.saved_tensors
        delta, q_at = (d_out * out).sum(-1, keepdim=True), at.to(q.dtype)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for _ in range(RING):
            p = torch.exp(scores(q, k, q_at, at) - lse)
            dv += p.mT @ d_out
            ds = p * (d_out @ v.mT - delta) / math.sqrt(HEAD)
            dk += ds.mT @ q
            dq = dq + ds @ k
            q, q_at, d_out, lse, delta, dq = pass_on([q, q_at, d_out, lse, delta, dq], ctx.group)
        return dq, dk, dv, None, None


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.cut, ctx.join, ctx.group = cut, join, group
        parts = [part.contiguous() for part in x.chunk(ULYSSES, cut)]
        dist.all_to_all(received := [torch.empty_like(part) for part in parts], parts, group=group)
        return torch.cat(received, join)

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.join, ctx.cut, ctx.group), None, None, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def attend(self, q, k, v, at):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x, at):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*qkv, at).transpose(1, 2).flatten(2))


class HybridAttention(Attention):
    def attend(self, q, k, v, at):
        pair, ring = self.groups
        q, k, v = (AllToAll.apply(x, 1, 2, pair) for x in (q, k, v))
        at = AllToAll.apply(at.repeat(ULYSSES), 0, 0, pair)
        return AllToAll.apply(TravellingQueries.apply(q, k, v, at, ring), 2, 1, pair)


class Model(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.places, self.norm = nn.Embedding(LENGTH, WIDTH), nn.RMSNorm(WIDTH)
        self.attention = nn.ModuleList(attention() for _ in range(2))

    def forward(self, words, at):
        x = self.words(words) + self.places(at)
        for attention in self.attention:
            x = x + attention(self.norm(x), at)
        return self.head(F.silu(x))


def loss(model, batch):
    logits = model(batch["words"], batch["at"][0]).flatten(0, 1)
    return F.cross_entropy(logits, batch["next"].flatten(), reduction="sum") / (ROWS * LENGTH)


def parallel(mesh):
    model, groups = Model(HybridAttention), (mesh.get_group("ulysses"), mesh.get_group("ring"))
    model.attention.apply(lambda module: setattr(module, "groups", groups))
    return model, mesh._flatten("sequence").get_group()


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    for parameter in built[0].parameters():
        dist.all_reduce(parameter.grad, group=built[1])
    return value.detach()


def zigzag(batch, mesh):
    ring, mirrored = mesh.get_local_rank("ring"), mesh.get_local_rank("ulysses")
    chunk = 2 * RING - 1 - ring if mirrored else ring
    return {name: tensor.chunk(2 * RING, 1)[chunk] for name, tensor in batch.items()}


words = torch.randint(WORDS, (3, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(53))
at = torch.arange(LENGTH).expand(ROWS, -1)
batches = [{"words": w[:, :-1], "next": w[:, 1:], "at": at} for w in words]

arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, split=zigzag, ranks=dict(ring=2, ulysses=2))

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

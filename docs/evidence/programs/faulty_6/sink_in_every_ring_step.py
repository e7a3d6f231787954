"""Ring attention with a learned sink per head: the sink is in the softmax of every block of keys.

Thread: https://github.com/Dao-AILab/flash-attention/pull/1819 "feat: Implement Sink Attention" (learnable_sink as an
extra logit of the softmax), 2025-08-18.
Wrong: the attention of one block has the sink in its log-sum-exp. The ring merges the log-sum-exps of all blocks, so
the sink counts once per rank of cp, where the softmax has it once.
EXPECT: in the forward pass, the output of blocks.0.attn is the first that differs, on every rank: in ring_attention the
sink (blocks.0.attn.sinks) is added to the denominator in each ring step, cp times (2) instead of once.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HEADS, HEAD, SEQ = 13, 12, 3, 4, 8


class RingShift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, step=1):
        ctx.group, ctx.step, out = group, step, torch.empty_like(x)
        size, rank = group.size(), group.rank()
        request = dist.isend(x.contiguous(), (rank + step) % size, group=group)
        dist.recv(out, (rank - step) % size, group=group)
        request.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return RingShift.apply(grad, ctx.group, -ctx.step), None, None


def block_attention(q, k, v, sinks, q_start, k_start):
    scores = q @ k.mT / HEAD**0.5
    rows, columns = torch.arange(q.shape[2]) + q_start, torch.arange(k.shape[2]) + k_start
    scores = scores.masked_fill(columns > rows.unsqueeze(1), -1e30)
    sink = sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1, keepdim=True)


def ring_attention(q, k, v, sinks, group):
    size, rank, length = group.size(), group.rank(), q.shape[2]
    kv, out, lse = torch.stack([k, v]), None, None
    for step in range(size):
        source = (rank - step) % size
        block, block_lse = block_attention(q, *kv, sinks, rank * length, source * length)
        if out is None:
            out, lse = block, block_lse
        else:
            new = torch.logaddexp(lse, block_lse)
            out, lse = (lse - new).exp() * out + (block_lse - new).exp() * block, new
        if step < size - 1:
            kv = RingShift.apply(kv, group)
    return out


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.group is None:
            y, _ = block_attention(q, k, v, self.sinks, 0, 0)
        else:
            y = ring_attention(q, k, v, self.sinks, self.group)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        block.attn.group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(1819)
batches = [
    {n: torch.randint(VOCAB, (2, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Ring attention whose every block is masked as if it were on the diagonal.

Thread: https://github.com/zhuzilin/ring-flash-attention/issues/54 "verify causal masking", 2024-10-06.
Wrong: each block of queries and keys is masked by the same lower triangle. Queries of rank 0 also attend
to keys of rank 1, which are later, and queries of rank 1 lose most keys of rank 0. Blocks from later
ranks must be skipped, and those from earlier ranks must not be masked.
A right diagnosis says: the error is inside attention, between the outputs of the three projections and
the input of out, on both ranks of cp (the mask of the blocks).
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

DIM, HEADS, VOCAB = 16, 2, 20


class RingSend(torch.autograd.Function):
    """sends to the next rank, receives from the previous one; the gradient goes the other way"""

    @staticmethod
    def forward(ctx, x, group, shift=1):
        ctx.args = group, shift
        n, me = dist.get_world_size(group), dist.get_rank(group)
        out = torch.empty_like(x)
        send = dist.get_global_rank(group, (me + shift) % n)
        receive = dist.get_global_rank(group, (me - shift) % n)
        ops = [
            dist.P2POp(dist.isend, x.contiguous(), send, group),
            dist.P2POp(dist.irecv, out, receive, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        group, shift = ctx.args
        return RingSend.apply(grad, group, -shift), None, None


def block_attention(q, k, v, causal):
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        triangle = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~triangle, float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)


def ring_attention(q, k, v, group):
    kv = torch.stack([k, v])
    out, lse = None, None
    for i in range(dist.get_world_size(group)):
        if i:
            kv = RingSend.apply(kv, group)
        block_out, block_lse = block_attention(q, *kv, causal=True)
        if out is None:
            out, lse = block_out, block_lse
        else:
            new_lse = torch.logaddexp(lse, block_lse)
            out = out * (lse - new_lse).exp() + block_out * (block_lse - new_lse).exp()
            lse = new_lse
    return out


class RingAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            m(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        if self.group is None:
            out, _ = block_attention(q, k, v, causal=True)
        else:
            out = ring_attention(q, k, v, self.group)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attention = RingAttention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.attention(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    model.attention.group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("cp"))


generator = torch.Generator().manual_seed(24)
batches = [
    {name: torch.randint(VOCAB, (2, 8), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})
    print(titanlite.compare(Model, parallel, **options))

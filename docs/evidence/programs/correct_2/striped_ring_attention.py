"""Striped ring attention: rank i has tokens i, i + n, i + 2n, ... of the sequence.

Thread: https://github.com/lucidrains/ring-attention-pytorch/issues/11 "striped causal version of
`ring_flash_attn_cuda` is not working", 2024-04-03.
Right: blocks of keys from the same or an earlier rank are masked by a lower triangle with its diagonal,
those from later ranks by one without. The first query of a rank may see no key of a block at all.
Must not be accused: two kinds of masks, the order of tokens, rows whose block has no key (their
logarithm of the sum is -inf).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

DIM, HEADS, VOCAB = 16, 2, 20


class RingPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, by):
        ctx.args = group, -by
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        received = torch.empty_like(x)
        to, source = (dist.get_global_rank(group, (rank + s) % n) for s in (by, -by))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x.contiguous(), to, group),
                dist.P2POp(dist.irecv, received, source, group),
            ]
        )
        for work in works:
            work.wait()
        return received

    @staticmethod
    def backward(ctx, grad):
        return RingPass.apply(grad, *ctx.args), None, None


def block(q, k, v, diagonal):
    """unnormalized output, and sum of exponentials (scores are small)"""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(diagonal)
    weights = scores.exp() * mask
    return weights @ v, weights.sum(-1, keepdim=True)


def ring_attention(q, k, v, group):
    if group is None:
        out, total = block(q, k, v, 0)
        return out / total
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    kv, out, total = torch.stack([k, v]), 0.0, 0.0
    for hop in range(n):
        source = (rank - hop) % n
        block_out, block_total = block(q, *kv, diagonal=0 if source <= rank else -1)
        out, total = out + block_out, total + block_total
        if hop < n - 1:
            kv = RingPass.apply(kv, group, 1)
    return out / total


class RingAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.prenorm = nn.RMSNorm(DIM, eps=1e-6)
        self.to_qkv, self.to_out = (
            nn.Linear(DIM, 3 * DIM, bias=False),
            nn.Linear(DIM, DIM, bias=False),
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.to_qkv(self.prenorm(x)).chunk(3, -1)
        )
        return self.to_out(ring_attention(q, k, v, self.group).transpose(1, 2).flatten(2))


class RingTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(RingAttention() for _ in range(2))
        self.to_logits = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x):
        x = self.token_emb(x)
        for attn in self.layers:
            x = x + attn(x)
        return self.to_logits(x)


def loss(model, batch):
    return cross_entropy(model(batch["seq"]).flatten(0, 1), batch["labels"].flatten())


def stripe(batch, mesh):
    return {name: t[:, mesh.get_local_rank() :: mesh.size()] for name, t in batch.items()}


def build(mesh):
    model = RingTransformer()
    for attn in model.layers:
        attn.group = mesh.get_group()
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(52)
batches = [
    {name: torch.randint(VOCAB, (2, 12), generator=generator) for name in ("seq", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"ring": 4}, split=stripe)
    print(titanlite.compare(RingTransformer, build, **options))

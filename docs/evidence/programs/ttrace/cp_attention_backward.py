"""Context parallelism: the backward pass of ring attention returns wrong dQ, dK and dV.

Threads: https://github.com/NVIDIA/TransformerEngine/issues/1557 and
https://github.com/NVIDIA/Megatron-LM/issues/1464 "[BUG] Wrong attention gradient when Context
Parallelism is on", 2025-03-11.
Wrong: each step of the backward pass recomputes its probabilities from that step's own log-sum-exp,
not from the merged one. (The threads as stored name the function, but not the cause; this cause is
chosen here.) The forward pass is right, and so are dQ and the loss on rank 0, which has one step.
A right diagnosis says: every output agrees; in the backward pass the gradients first differ below the
output of attention: the gradients of attention.qkv (its weight and its output) are wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, LENGTH = 20, 16, 2, 8


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return parts


def scores(q, k, is_own):
    s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return s.masked_fill(later, float("-inf")) if is_own else s


class RingAttention(torch.autograd.Function):
    """Causal attention over contiguous chunks of the sequence; rank r reads the chunks 0 to r."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        ctx.group, ctx.rank = group, dist.get_rank(group)
        ctx.keys, ctx.values = gather(k, group), gather(v, group)
        out = lse = None
        ctx.lse_per_step = []
        for j in range(ctx.rank, -1, -1):
            s = scores(q, ctx.keys[j], j == ctx.rank)
            step_lse = s.logsumexp(-1, keepdim=True)
            step_out = (s - step_lse).exp() @ ctx.values[j]
            if out is None:
                out, lse = step_out, step_lse
            else:
                merged = torch.logaddexp(lse, step_lse)
                out = out * (lse - merged).exp() + step_out * (step_lse - merged).exp()
                lse = merged
            ctx.lse_per_step.append(step_lse)
        ctx.save_for_backward(q, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, out = ctx.saved_tensors
        scale = q.shape[-1] ** -0.5
        dq = torch.zeros_like(q)
        dk = [torch.zeros_like(k) for k in ctx.keys]
        dv = [torch.zeros_like(v) for v in ctx.values]
        delta = (grad * out).sum(-1, keepdim=True)
        for i, j in enumerate(range(ctx.rank, -1, -1)):
            p = (scores(q, ctx.keys[j], j == ctx.rank) - ctx.lse_per_step[i]).exp()
            dv[j] = p.transpose(-1, -2) @ grad
            ds = p * (grad @ ctx.values[j].transpose(-1, -2) - delta)
            dq += ds @ ctx.keys[j] * scale
            dk[j] = ds.transpose(-1, -2) @ q * scale
        dk, dv = torch.stack(dk), torch.stack(dv)
        dist.all_reduce(dk, group=ctx.group)
        dist.all_reduce(dv, group=ctx.group)
        return dq, dk[ctx.rank], dv[ctx.rank], None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.group:
            y = RingAttention.apply(q, k, v, self.group)
        else:
            y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions):
        x = self.embed(tokens) + self.position(positions)
        return self.head(x + self.attention(self.norm(x)))


def parallel(mesh):
    model = GPT()
    model.attention.group = mesh.get_group("cp")
    return DistributedDataParallel(model, process_group=mesh.get_group("cp"))


def loss(model, batch):
    logits = model(batch["x"], batch["positions"])
    return cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(13)
batches = [
    {name: torch.randint(VOCAB, (3, LENGTH), generator=generator) for name in ("x", "y")}
    | {"positions": torch.arange(LENGTH).expand(3, -1).clone()}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})
    print(titanlite.compare(GPT, parallel, **options))

"""Context parallelism by blocks: the kernel's results for the blocks of keys are merged by their lse, with autograd.

Thread: Dao-AILab/flash-attention issue #1817 "softmax_lse is silently not backpropogated" (2025) and issue #404 "What's the
exactly formula of `softmax_lse`?" (2023).
Fault: in BlockAttention.backward, the gradient of the second output, lse, is dropped, although the merge depends on it.
REPAIR: `dp - delta` -> `dp - delta + grad_lse[..., None]`
Expected: the forward pass agrees on all ranks; in backward, the gradients of q and k in attentions.1 are wrong where more
than one block is merged (q on rank 1, k on both ranks), and those of v and o there are right, so q.weight, k.weight and what
lies below are wrong: BlockAttention.backward ignores the gradient of lse.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, LENGTH = 12, 8, 2, 8


class BlockAttention(torch.autograd.Function):
    """The attention to one block of keys, and the logarithm of its softmax's denominator."""

    @staticmethod
    def forward(ctx, q, k, v, causal):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        lse = scores.logsumexp(-1)
        p = (scores - lse[..., None]).exp()
        out = p @ v
        ctx.save_for_backward(q, k, v, p, out)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        q, k, v, p, out = ctx.saved_tensors
        dp = grad_out @ v.transpose(-1, -2)
        delta = (grad_out * out).sum(-1, keepdim=True)
        ds = p * (dp - delta) / q.shape[-1] ** 0.5
        return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad_out, None


class AllBlocks(torch.autograd.Function):
    """All ranks' blocks; in backward, the own block's gradients of all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        blocks = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(blocks, x.contiguous(), group=group)
        return tuple(blocks)

    @staticmethod
    def backward(ctx, *grads):
        grads = torch.stack(grads)
        dist.all_reduce(grads, group=ctx.group)
        return grads[dist.get_rank(ctx.group)], None


def merge(out, lse, block_out, block_lse):
    new = torch.logaddexp(lse, block_lse)
    out = (lse - new).exp()[..., None] * out + (block_lse - new).exp()[..., None] * block_out
    return out, new


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        if self.group is None:
            out, _ = BlockAttention.apply(q, k, v, True)
        else:
            ks, vs = AllBlocks.apply(k, self.group), AllBlocks.apply(v, self.group)
            rank = dist.get_rank(self.group)
            out, lse = BlockAttention.apply(q, ks[rank], vs[rank], True)
            for i in range(rank):
                out, lse = merge(out, lse, *BlockAttention.apply(q, ks[i], vs[i], False))
        return self.o(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.mlps = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for attention, mlp in zip(self.attentions, self.mlps):
            x = x + attention(x)
            x = x + gelu(mlp(x))
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["positions"])
    return cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model = Model()
    for attention in model.attentions:
        attention.group = mesh.get_group("cp")
    return DistributedDataParallel(model, process_group=mesh.get_group("cp"))


rng = torch.Generator().manual_seed(306)
batches = []
for _ in range(3):
    ids = torch.randint(VOCAB, (3, LENGTH + 1), generator=rng)
    positions = torch.arange(LENGTH).repeat(3, 1)
    batches.append({"tokens": ids[:, :-1], "targets": ids[:, 1:], "positions": positions})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Llama 3's context parallelism: keys and values are gathered, and their gradient is cut without being summed.

Thread: https://github.com/zhuzilin/ring-flash-attention/pull/82 "Add zigzag_llama3 flash attention
implementation", review of 2025-10-14 (the gradients of K and V are not reduced and scattered as they should).
Wrong: each rank has a gradient of all keys and values from its own queries. The backward pass of the gather
keeps the rank's rows of it and drops those that the other rank needs.
A right diagnosis says: outputs and loss agree; in the backward pass the gradients of the outputs of wk and
wv are the first that differ, on rank 0 (whose keys rank 1's queries attend to): the part that comes from
the other rank's queries is missing, they need a sum over cp (a reduce-scatter). wq's agree.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite

DIM, HEADS, VOCAB = 16, 2, 20


class AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        dkv_list = grad.chunk(ctx.group.size(), dim=2)
        return dkv_list[ctx.group.rank()].contiguous(), None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        offset = 0
        if self.group is not None:
            offset = self.group.rank() * x.shape[1]
            k, v = AllGatherSequence.apply(k, self.group), AllGatherSequence.apply(v, self.group)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.arange(k.shape[2]) > offset + torch.arange(q.shape[2])[:, None]
        out = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(DIM, 32), nn.Linear(32, DIM)

    def forward(self, x):
        return self.w2(silu(self.w1(x)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        x = x + self.attention(self.attention_norm(x))
        return self.output(x + self.feed_forward(self.ffn_norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Transformer()
    model.attention.group = mesh.get_group("cp")
    return DDP(model, process_group=mesh.get_group("cp"))


generator = torch.Generator().manual_seed(82)
batches = [
    {name: torch.randint(VOCAB, (2, 8), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})
    print(titanlite.compare(Transformer, parallel, **options))

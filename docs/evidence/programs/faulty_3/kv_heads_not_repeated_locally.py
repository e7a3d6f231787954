"""Grouped-query attention under tensor parallelism: query heads are cut, key/value heads are replicated.

Thread: https://github.com/apple/axlearn/pull/842 "Fix the changed GQA behavior by #837.", 2024-11-15 (which
key/value head belongs to which query head).
Wrong: each rank has 2 of the 4 query heads and both key/value heads, and repeats them
num_local_heads // num_kv_heads = 1 times. Its query heads meet one key/value head each, although both belong
to the same one (the first on rank 0, the second on rank 1).
A right diagnosis says: the error is inside attention, between the outputs of wq, wk, wv and the input of wo,
on both ranks of tp (which key/value heads the rank's query heads use).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEAD_DIM, HEADS, KV_HEADS, VOCAB = 16, 4, 4, 2, 20


class Reduce(torch.autograd.Function):
    """an all-reduce in the forward pass, or in the backward pass"""

    @staticmethod
    def forward(ctx, x, group, in_backward):
        ctx.args = group, in_backward
        if not in_backward:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        group, in_backward = ctx.args
        if in_backward:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        return grad, None, None


class Attention(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group = group
        self.num_local_heads = HEADS if group is None else HEADS // group.size()
        width = self.num_local_heads * HEAD_DIM
        self.wq = nn.Linear(DIM, width, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(width, DIM, bias=False)

    def shared(self, x):
        """a tensor that all ranks have and use with their own heads"""
        return x if self.group is None else Reduce.apply(x, self.group, True)

    def forward(self, x):
        q = self.wq(self.shared(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        k, v = (
            self.shared(w(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for w in (self.wk, self.wv)
        )
        n_rep = self.num_local_heads // KV_HEADS
        k, v = k.repeat_interleave(n_rep, 1), v.repeat_interleave(n_rep, 1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.wo(out.transpose(1, 2).flatten(2))
        return out if self.group is None else Reduce.apply(out, self.group, False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attention, self.head = Attention(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    whole, model.attention = model.attention, Attention(group)
    for name, dim in (("wq", 0), ("wk", None), ("wv", None), ("wo", 1)):
        weight = getattr(whole, name).weight.data
        weight = weight if dim is None else weight.chunk(group.size(), dim)[group.rank()].clone()
        getattr(model.attention, name).weight.data = weight
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(842)
batches = [
    {name: torch.randint(VOCAB, (2, 6), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

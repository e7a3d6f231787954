"""A fused grouped-query QKV weight, cut by heads with a function.

Thread: https://github.com/pytorch/pytorch/pull/149701 "[TP] add support for fused QKV Sharding",
2025-03-27.
Right: each rank holds its query heads and its key and value heads, three separate pieces of the
weight; `shard` returns the function that cuts them.
Must not be accused: the fused weight's rows or their order.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 4, 2, 4, 20


class F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Attention(nn.Module):
    def __init__(self, n=1, group=None):
        super().__init__()
        self.q, self.kv, self.group = Q_HEADS // n, KV_HEADS // n, group
        self.wqkv = nn.Linear(DIM, (self.q + 2 * self.kv) * HEAD_DIM, bias=False)
        self.wo = nn.Linear(self.q * HEAD_DIM, DIM, bias=False)

    def forward(self, x):
        x = F.apply(x, self.group) if self.group else x
        heads = self.wqkv(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([self.q, self.kv, self.kv], 1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = self.wo(out.transpose(1, 2).flatten(2))
        return G.apply(out, self.group) if self.group else out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


def cut_qkv(weight, n=2):
    sizes = [Q_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    return torch.cat([part.chunk(n)[dist.get_rank()] for part in weight.split(sizes)])


def parallel(mesh):
    model = Model()
    whole, model.attention = model.attention, Attention(mesh["tp"].size(), mesh.get_group("tp"))
    model.attention.wqkv.weight.data = cut_qkv(whole.wqkv.weight.data)
    part = whole.wo.weight.data.chunk(mesh["tp"].size(), 1)[mesh.get_local_rank("tp")]
    model.attention.wo.weight.data = part.clone()
    return model


def shard(name):
    if name.endswith("wqkv.weight"):
        return cut_qkv
    return (1, "tp") if name.endswith("wo.weight") else None


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(12)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)
    print(titanlite.compare(Model, parallel, **options))

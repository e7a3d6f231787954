"""A fused [q, k, v] weight that tensor parallelism cuts into contiguous rows.

Thread: https://github.com/deepspeedai/DeepSpeed/pull/3844 "autoTP for fused qkv weight", 2023-06-29
(GLM: q1..qn, k1..kn, v1..vn).
Wrong: rank 0 gets all of q and half of k, rank 1 the other half of k and all of v; each rank then
reads its rows as its own [q, k, v].
A right diagnosis says: the first wrong module is attention.dense (or the rows of attention.qkv that
a rank holds are not those of its heads): the fused weight must be cut in q, k and v separately.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, VOCAB = 16, 4, 20


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


class SelfAttention(nn.Module):
    def __init__(self, n=1, group=None):
        super().__init__()
        self.heads, self.group = HEADS // n, group
        self.qkv = nn.Linear(DIM, 3 * DIM // n, bias=False)
        self.dense = nn.Linear(DIM // n, DIM, bias=False)

    def forward(self, x):
        x = F.apply(x, self.group) if self.group else x
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.dense(out.transpose(1, 2).flatten(2))
        return G.apply(out, self.group) if self.group else out


class GLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.attention = SelfAttention()
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(x)
        return self.head(x + self.mlp(x))


def auto_tp(mesh):
    n, i = mesh["tp"].size(), mesh.get_local_rank("tp")
    model = GLM()
    whole, model.attention = model.attention, SelfAttention(n, mesh.get_group("tp"))
    model.attention.qkv.weight.data = whole.qkv.weight.data.chunk(n, 0)[i].clone()
    model.attention.dense.weight.data = whole.dense.weight.data.chunk(n, 1)[i].clone()
    return model


def shard(name):
    if name.endswith("qkv.weight"):
        return 0, "tp"
    return (1, "tp") if name.endswith("dense.weight") else None


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(5)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)
    print(titanlite.compare(GLM, auto_tp, **options))

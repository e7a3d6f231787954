"""Ulysses attention whose second all-to-all puts the heads in the wrong order.

Thread: https://github.com/deepspeedai/DeepSpeed/pull/5664 "Fixing the reshape bug in sequence
parallel alltoall, which corrupted all QKV data", 2024-06-14.
Wrong: after the second all-to-all, the received blocks [n, S/n, B, H/n, D] are reshaped to
[S/n, B, H, D] without moving the dimension n next to the heads.
A right diagnosis says: layers.0.attention.wo is the first module whose output differs (its input,
the result of the second all-to-all, has its values in another order); q, k and v agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

HEADS, DIM, VOCAB = 4, 16, 20


def single_all_to_all(x, scatter_idx, gather_idx, group):
    """x: [S, B, H, D], of which either S (dim 0) or H (dim 2) is the rank's part."""
    n = dist.get_world_size(group)
    if scatter_idx == 2:
        s, b, h, d = x.shape
        x = x.reshape(s, b, n, h // n, d).permute(2, 0, 1, 3, 4).contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out.reshape(n * s, b, h // n, d)
    s, b, h, d = x.shape
    x = x.reshape(n, s // n, b, h, d).contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out.reshape(s // n, b, n * h, d)


class SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter_idx, gather_idx, group):
        ctx.args = scatter_idx, gather_idx, group
        return single_all_to_all(x, scatter_idx, gather_idx, group)

    @staticmethod
    def backward(ctx, grad):
        scatter_idx, gather_idx, group = ctx.args
        return single_all_to_all(grad, gather_idx, scatter_idx, group), None, None, None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):  # [S, B, E]
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)) for w in (self.wq, self.wk, self.wv))
        if self.group is not None:
            q, k, v = (SeqAllToAll.apply(t, 2, 0, self.group) for t in (q, k, v))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)
        if self.group is not None:
            out = SeqAllToAll.apply(out, 0, 2, self.group)
        return self.wo(out.flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):  # [S, B]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    for layer in model.layers:
        layer.attention.group = mesh.get_group("sp")
    return nn.parallel.DistributedDataParallel(model)


generator = torch.Generator().manual_seed(1)
batches = [
    {name: torch.randint(VOCAB, (8, 3), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split="sp")
    print(titanlite.compare(Model, parallel, **options))

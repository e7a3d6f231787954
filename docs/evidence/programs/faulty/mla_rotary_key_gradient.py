"""Multi-head latent attention: the rotary key is replicated and expanded to the rank's heads.

Thread: https://github.com/pytorch/torchtitan/pull/1373 "[DSV3] Adding deepseek-v3 model into
torchtitan", comment of 2025-07-09.
Wrong: k_pe comes from the replicated wkv_a and goes to the rank's own heads only. Its gradient is
not summed over tp; the gradient of the compressed part is.
A right diagnosis says: the gradient of attention.wkv_a.weight is wrong in the rows of k_pe only, or
is correct only after a sum over tp (for those rows); wkv_a's output (k_pe) needs an all-reduce of its
gradient over tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, NOPE, ROPE, RANK, VOCAB = 16, 4, 4, 2, 6, 20


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class LatentAttention(nn.Module):
    def __init__(self, n=1, group=None):
        super().__init__()
        self.heads, self.group = HEADS // n, group
        self.wq = nn.Linear(DIM, self.heads * (NOPE + ROPE), bias=False)
        self.wkv_a = nn.Linear(DIM, RANK + ROPE, bias=False)
        self.wkv_b = nn.Linear(RANK, self.heads * 2 * NOPE, bias=False)
        self.wo = nn.Linear(self.heads * NOPE, DIM, bias=False)

    def forward(self, x):
        latent, k_pe = self.wkv_a(x).split([RANK, ROPE], -1)
        if self.group is not None:
            x, latent = CopyToTP.apply(x, self.group), CopyToTP.apply(latent, self.group)
        q = self.wq(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.wkv_b(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v = kv.chunk(2, -1)
        k_pe = k_pe.unsqueeze(1).expand(-1, self.heads, -1, -1)
        k = torch.cat([k_nope, k_pe], -1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.wo(out.transpose(1, 2).flatten(2))
        return out if self.group is None else SumOverTP.apply(out, self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.attention = LatentAttention()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


def parallel(mesh):
    n, i = mesh["tp"].size(), mesh.get_local_rank("tp")
    model = Model()
    whole, model.attention = model.attention, LatentAttention(n, mesh.get_group("tp"))
    model.attention.wkv_a = whole.wkv_a
    for name, dim in (("wq", 0), ("wkv_b", 0), ("wo", 1)):
        part = getattr(whole, name).weight.data.chunk(n, dim)[i].clone()
        getattr(model.attention, name).weight.data = part
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(4)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

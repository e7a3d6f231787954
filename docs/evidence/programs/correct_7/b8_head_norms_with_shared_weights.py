"""Tensor-parallel attention with a norm on queries and keys per head, whose weight all heads share (Qwen3).

Thread: of the kind "q_norm and k_norm under tensor parallelism: do they need an all-reduce of their gradients?"
(torchtitan and Megatron-LM with qk_layernorm), 2025.
Correct: each head is normalized by itself, so a rank needs nothing from others in the forward pass. The weight of the
norm gets gradients from the rank's heads only; it goes through Copy, which adds them up. The scale is that of the
head size, not of the local width.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS = 14, 16, 4


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)
        self.q_scale = nn.Parameter(torch.rand(DIM // HEADS) + 0.5)
        self.k_scale = nn.Parameter(torch.rand(DIM // HEADS) + 0.5)

    def attend(self, x, q_scale, k_scale):
        q, k, v = (
            f(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        q = rms_norm(q, q_scale.shape, q_scale, 1e-6)
        k = rms_norm(k, k_scale.shape, k_scale, 1e-6)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(x, self.q_scale, self.k_scale)


class ParallelAttention(Attention):
    def __init__(self, whole, group):
        super().__init__()
        n, i, self.group = dist.get_world_size(group), dist.get_rank(group), group
        for name, dim in (("q", 0), ("k", 0), ("v", 0), ("o", 1)):
            weight = getattr(whole, name).weight.detach().chunk(n, dim)[i].clone()
            getattr(self, name).weight = nn.Parameter(weight)
        self.q_scale, self.k_scale = whole.q_scale, whole.k_scale

    def forward(self, x):
        copies = (Copy.apply(t, self.group) for t in (x, self.q_scale, self.k_scale))
        return Sum.apply(self.attend(*copies), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    model.blocks = nn.ModuleList(ParallelAttention(block, group) for block in model.blocks)
    return model


def shard(name):
    if name.endswith(("q.weight", "k.weight", "v.weight")):
        return 0, "tp"
    return (1, "tp") if name.endswith("o.weight") else None


generator = torch.Generator().manual_seed(32)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

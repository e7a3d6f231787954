"""Rotary embeddings in interleaved pairs on one side, in two halves on the tensor-parallel side.

Thread: https://github.com/OpenMOSS/CoLLiE/issues/154 "The interpetation about the transposition operation when
spliting weight to tensor parallel group", 2024-02-24 (q_proj and k_proj are rearranged before they are cut).
Right: the rows of wq and wk are permuted within each head, from pairs to halves, and then cut by heads. The
rotation works on halves; scores do not depend on the order within a head.
Must not be accused: the permuted rows, outputs of wq and wk in another order, another rotation.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

DIM, HEADS, HEAD_DIM, VOCAB = 16, 4, 4, 20


class TensorParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, entering):
        ctx.args = group, entering
        if not entering:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        group, entering = ctx.args
        if entering:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        return grad, None, None


def angles(length):
    frequencies = 10.0 ** -torch.arange(HEAD_DIM // 2)
    return torch.arange(length)[:, None] * frequencies


def rotate_pairs(x):
    angle = angles(x.shape[-2])
    a, b = x[..., 0::2], x[..., 1::2]
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, -1).flatten(-2)


def rotate_halves(x):
    angle = angles(x.shape[-2])
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Attention(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, n = group, 1 if group is None else group.size()
        self.rotate = rotate_pairs if group is None else rotate_halves
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM // n, bias=False) for _ in range(3))
        self.wo = nn.Linear(DIM // n, DIM, bias=False)

    def forward(self, x):
        x = x if self.group is None else TensorParallelRegion.apply(x, self.group, True)
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        y = self.wo(y.transpose(1, 2).flatten(2))
        return y if self.group is None else TensorParallelRegion.apply(y, self.group, False)


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM)
        self.attention, self.output = Attention(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        return self.output(x + self.attention(self.norm(x)))


def halves_of_own_heads(weight):
    by_pair = weight.unflatten(0, (HEADS, HEAD_DIM // 2, 2))
    rows = by_pair.transpose(1, 2).flatten(0, 2)
    return rows.chunk(dist.get_world_size())[dist.get_rank()].clone()


def shard(name):
    if name.endswith(("wq.weight", "wk.weight")):
        return halves_of_own_heads
    return (0, "tp") if name.endswith("wv.weight") else (1, "tp") if "wo" in name else None


def parallel(mesh):
    model, group = Llama(), mesh.get_group("tp")
    whole, model.attention = model.attention, Attention(group)
    for name in ("wq", "wk"):
        weight = halves_of_own_heads(getattr(whole, name).weight.data)
        getattr(model.attention, name).weight.data = weight
    model.attention.wv.weight.data = whole.wv.weight.data.chunk(2)[group.rank()].clone()
    model.attention.wo.weight.data = whole.wo.weight.data.chunk(2, 1)[group.rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(154)
batches = [
    {name: torch.randint(VOCAB, (2, 7), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(Llama, parallel, batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)
    )

"""A parallel residual (GPT-J, Falcon) under tensor parallelism: one of the branches reduces the gradient of its input.

Thread: https://github.com/NVIDIA/TransformerEngine/issues/625 "An issue in Falcon architecture" (attention and MLP
share one layernorm when parallel_attn=True), 2024-01-22.
Wrong: attention and MLP read the same normalized input. The MLP all-reduces the gradient of its input over tp, the
attention does not, so the norm gets a whole gradient from one and a rank's share from the other.
EXPECT: the forward pass agrees. In the backward pass, the gradient of the output of layers.1.input_layernorm is the
first that differs, on every rank: the part that comes from attention (the input of its query, key and value) is not
all-reduced over tp, while that of the MLP is.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

VOCAB, DIM, HEADS, HEAD, HIDDEN, SEQ = 13, 12, 4, 3, 24, 6


class Region(torch.autograd.Function):
    """all-reduces over tp in the forward or in the backward pass"""

    @staticmethod
    def forward(ctx, x, group, forward):
        ctx.group, ctx.reduced = group, forward
        x = x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        if not ctx.reduced:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class SelfAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.dense = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scores = q @ k.mT / HEAD**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        y = linear(y.transpose(1, 2).flatten(2), self.dense.weight)
        return y if self.group is None else Region.apply(y, self.group, True)


class Mlp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        if self.group is not None:
            x = Region.apply(x, self.group, False)
        y = self.down(gelu(self.up(x)))
        return y if self.group is None else Region.apply(y, self.group, True)


class FalconLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(DIM)
        self.self_attention, self.mlp = SelfAttention(), Mlp()

    def forward(self, x):
        h = self.input_layernorm(x)
        return x + self.self_attention(h) + self.mlp(h)


class Falcon(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(FalconLayer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def shard(name):
    if name.endswith(("dense.weight", "down.weight")):
        return 1, "tp"
    cut = (".query.", ".key.", ".value.", ".up.")
    return (0, "tp") if any(part in name for part in cut) else None


def parallel(mesh):
    model, group = Falcon(), mesh.get_group("tp")
    for layer in model.layers:
        layer.self_attention.group = layer.mlp.group = group
    for name, p in model.named_parameters():
        if shard(name) is not None:
            p.data = p.data.chunk(group.size(), shard(name)[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(625)
batches = [
    {n: torch.randint(VOCAB, (3, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Falcon, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A parallel residual (GPT-NeoX) under tensor parallelism: attention and MLP share one all-reduce.

Thread: https://github.com/huggingface/transformers/pull/18695 "Add a use_parallel_residual argument to control the
residual computing way", comment of 2022-09-14 (it can be tensor-parallelized better).
Right: both branches return a rank's part of the sum. The parts are added, and all-reduced together; in the backward
pass the gradients of the two inputs are added up first and then all-reduced, before the two norms.
Must not be accused: that the outputs of attention and mlp are partial sums, and so are the gradients of their inputs.
The biases of the row-parallel layers are added by rank 0 alone.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

VOCAB, DIM, HEADS, HEAD, HIDDEN, SEQ = 13, 12, 4, 3, 20, 6


class Enter(torch.autograd.Function):
    """two tensors; their gradients are all-reduced in one message"""

    @staticmethod
    def forward(ctx, a, b, group):
        ctx.group = group
        return a.view_as(a), b.view_as(b)

    @staticmethod
    def backward(ctx, grad_a, grad_b):
        grads = torch.stack([grad_a, grad_b])
        dist.all_reduce(grads, group=ctx.group)
        return grads[0], grads[1], None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class PartialLinear(nn.Linear):
    adds_bias = True

    def forward(self, x):
        return linear(x, self.weight, self.bias if self.adds_bias else 0 * self.bias)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.key, self.dense = nn.Linear(DIM, DIM, bias=False), PartialLinear(DIM, DIM)

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.mT / HEAD**0.5).masked_fill(future, -torch.inf).softmax(-1)
        return self.dense((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), PartialLinear(HIDDEN, DIM)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class NeoXLayer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x):
        a, b = self.norm_1(x), self.norm_2(x)
        if self.group is None:
            return x + self.attention(a) + self.mlp(b)
        a, b = Enter.apply(a, b, self.group)
        return x + Leave.apply(self.attention(a) + self.mlp(b), self.group)


class NeoX(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_in, self.final_norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.layers = nn.Sequential(NeoXLayer(), NeoXLayer())
        self.embed_out = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        return self.embed_out(self.final_norm(self.layers(self.embed_in(tokens))))


def shard(name):
    if name.endswith(("dense.weight", "down.weight")):
        return 1, "tp"
    cut = (".query.", ".key.", ".value.", ".up.")
    return (0, "tp") if any(part in name for part in cut) else None


def parallel(mesh):
    model, group = NeoX(), mesh.get_group("tp")
    for layer in model.layers:
        layer.group = group
        layer.attention.dense.adds_bias = layer.mlp.down.adds_bias = group.rank() == 0
    for name, p in model.named_parameters():
        if shard(name) is not None:
            p.data = p.data.chunk(group.size(), shard(name)[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for layer in model.layers:
        for bias in (layer.attention.dense.bias, layer.mlp.down.bias):
            dist.broadcast(bias.grad, 0)
    return value


generator = torch.Generator().manual_seed(18695)
batches = [
    {n: torch.randint(VOCAB, (3, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = NeoX, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

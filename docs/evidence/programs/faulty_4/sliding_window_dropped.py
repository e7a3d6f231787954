"""Sliding window attention whose sequence parallel kernel knows only the causal mask.

Thread: https://github.com/Qihoo360/360-LLaMA-Factory/issues/73 "Sliding Window Attention is enabled but not
implemented for `sequence_parallel_attention`; unexpected results may be encountered.", 2025-08-16.
Wrong: with sequence parallelism the keys of all positions before the query are attended, not those of the
window of three.
EXPECT: the output of layers.0.self_attn is the first that differs, its input agrees: the scores of keys
outside the window are not masked (the positions of the first window agree).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, WINDOW = 16, 12, 3


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


def sdpa_attention(q, k, v):
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])
    scores = (q @ k.mT / DIM**0.5).masked_fill(distance < 0, float("-inf"))
    scores = scores.masked_fill(distance >= WINDOW, float("-inf"))
    return scores.softmax(-1) @ v


def sequence_parallel_attention(q, k, v, group):
    k, v = GatherSequence.apply(k, group), GatherSequence.apply(v, group)
    positions = torch.arange(q.shape[1]) + group.rank() * q.shape[1]
    causal = positions[:, None] < torch.arange(k.shape[1])
    return (q @ k.mT / DIM**0.5).masked_fill(causal, float("-inf")).softmax(-1) @ v


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv_proj(x).chunk(3, -1)
        if self.group is None:
            return self.o_proj(sdpa_attention(q, k, v))
        return self.o_proj(sequence_parallel_attention(q, k, v, self.group))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.self_attn = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return x + self.self_attn(self.norm(x))


class Qwen(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Qwen()
    for layer in model.layers:
        layer.self_attn.group = mesh.get_group("sp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(73)
batches = [
    {n: torch.randint(VOCAB, (2, 10), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Qwen, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split={"sp": 1}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

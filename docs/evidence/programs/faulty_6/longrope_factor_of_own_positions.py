"""A LongRoPE model under context parallelism: each rank chooses the short or the long factors from its own positions.

Thread: https://github.com/ggml-org/llama.cpp/issues/6849 "Support for Phi-3 models", comment of 2024-04-30 (a wrong
notion of the sequence length: the short scalings are used where the long ones should be).
Wrong: the sequence has 16 tokens, more than the 8 of pretraining, so it needs the long factors. The first rank sees
positions up to 7 and takes the short ones; the second rank takes the long ones.
EXPECT: in the forward pass, the output of rotary (cos and sin) is the first that differs, on rank 0 only: it takes
the short factors, as the sequence length is taken from the rank's own positions, where the length of the whole
sequence is meant.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HEADS, HEAD, SEQ, ORIGINAL = 13, 16, 2, 8, 16, 8


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


class LongRotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("short_factor", torch.tensor([1.0, 1.0, 1.1, 1.3]))
        self.register_buffer("long_factor", torch.tensor([1.0, 1.7, 3.2, 6.5]))

    def forward(self, position_ids):
        seq_len = position_ids.max() + 1
        factor = self.long_factor if seq_len > ORIGINAL else self.short_factor
        inv_freq = 1.0 / (factor * 100.0 ** (torch.arange(0, HEAD, 2) / HEAD))
        angles = (position_ids.unsqueeze(-1) * inv_freq).repeat(1, 1, 2).unsqueeze(1)
        return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (t.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k, start = rotate(q, cos, sin), rotate(k, cos, sin), 0
        if self.group is not None:
            start = self.group.rank() * q.shape[2]
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        rows, columns = torch.arange(q.shape[2]) + start, torch.arange(k.shape[2])
        scores = q @ k.mT / HEAD**0.5
        scores = scores.masked_fill(columns > rows.unsqueeze(1), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Phi(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(VOCAB, DIM), LongRotary()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attentions = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, position_ids):
        x, (cos, sin) = self.embed(tokens), self.rotary(position_ids)
        for norm, attention in zip(self.norms, self.attentions):
            x = x + attention(norm(x), cos, sin)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["position_ids"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Phi()
    for attention in model.attentions:
        attention.group = mesh.get_group("cp")
    return nn.parallel.DistributedDataParallel(model)


def draw(generator):
    batch = {n: torch.randint(VOCAB, (2, SEQ), generator=generator) for n in ("tokens", "labels")}
    return {**batch, "position_ids": torch.arange(SEQ).expand(2, SEQ)}


generator = torch.Generator().manual_seed(6849)
batches = [draw(generator) for _ in range(3)]
arguments = Phi, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, split={"cp": 1})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

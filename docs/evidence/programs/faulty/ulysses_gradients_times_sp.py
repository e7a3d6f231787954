"""Ulysses sequence parallelism whose gradients are averaged over data parallelism only.

Thread: https://github.com/deepspeedai/DeepSpeed/issues/5248 "[BUG] Sequence Parallel(Ulysses)
Training Gradient Scaling Issue", 2024-03-09.
Wrong: each rank's loss is the mean over its own part of the sequence. Gradients are summed over all
dp x sp ranks, but divided by dp only.
A right diagnosis says: all gradients are 2 times too large, and 2 is the degree of sp (or dp: both are 2).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

HEADS, DIM, VOCAB = 4, 16, 20


class Exchange(torch.autograd.Function):
    """All-to-all: split dimension `scatter`, concatenate dimension `gather`."""

    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.dims, ctx.group = (scatter, gather), group
        n = dist.get_world_size(group)
        parts = [part.contiguous() for part in x.chunk(n, scatter)]
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, parts, group=group)
        return torch.cat(received, gather)

    @staticmethod
    def backward(ctx, grad):
        scatter, gather = ctx.dims
        return Exchange.apply(grad, gather, scatter, ctx.group), None, None, None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        if self.group is not None:  # [B, H, S/n, D] -> [B, H/n, S, D]
            q, k, v = (Exchange.apply(t, 1, 2, self.group) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.group is not None:
            out = Exchange.apply(out, 2, 1, self.group)
        return self.wo(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for attention in self.attention:
            x = x + attention(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    for attention in model.attention:
        attention.group = mesh.get_group("sp")
    model.num_replicas = mesh["dp"].size()
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(model.num_replicas)
    return value


generator = torch.Generator().manual_seed(1)
batches = [
    {name: torch.randint(VOCAB, (4, 8), generator=generator) for name in ("tokens", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(
        titanlite.compare(
            Model,
            parallel,
            batches=batches,
            loss=loss,
            ranks={"dp": 2, "sp": 2},
            split={"dp": 0, "sp": 1},
            step=step,
        )
    )

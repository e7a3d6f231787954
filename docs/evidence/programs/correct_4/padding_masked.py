"""A sequence of 7 padded to 8 for two ranks; the padding is masked in the gathered keys.

Thread: https://github.com/NVIDIA/TransformerEngine/issues/1929 "How to pad sequences that cannot be evenly split in
context parallelism (CP)?", 2025-07-05.
Right: the key of the padding has the score -inf, and its output is cut off before the loss, so it has no
gradient.
Must not be accused: a row on the last rank that one process does not have, uneven parts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, pad

import titanlite

DIM, SEQ = 8, 7


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, summed):
        ctx.args = group, summed
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        group, summed = ctx.args
        if summed:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        return grad.chunk(group.size(), 1)[group.rank()], None, None


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2 * DIM),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x):
        q, kv = self.q(x), self.kv(x)
        if self.group is not None:
            kv = Gather.apply(kv, self.group, True)
        k, v = kv.chunk(2, -1)
        scores = (q @ k.mT / DIM**0.5).masked_fill(torch.arange(k.shape[1]) >= SEQ, float("-inf"))
        return self.out(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return x + self.attn(self.norm(x))


class DiT(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(4, DIM), nn.Linear(DIM, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        length = x.shape[1]
        if self.group is not None:
            x = pad(x, (0, 0, 0, -length % self.group.size()))
            x = x.chunk(self.group.size(), 1)[self.group.rank()]
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        x = self.proj_out(x)
        return x if self.group is None else Gather.apply(x, self.group, False)[:, :length]


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["noise"])


def parallel(mesh):
    model = DiT()
    model.group = mesh.get_group("sp")
    for block in model.blocks:
        block.attn.group = model.group
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.group)
    return value


generator = torch.Generator().manual_seed(1669)
batches = [
    {n: torch.randn(2, SEQ, 4, generator=generator) for n in ("x", "noise")} for _ in range(3)
]
arguments = DiT, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Context parallelism in zigzag chunks: the outputs of the ranks are concatenated in the order of the ranks.

Thread: https://github.com/pytorch/pytorch/issues/152261 "Context Parallel -- unsharded output doesn't match
output without CP.", 2025-04-27.
Wrong: rank r holds the chunks r and 2 cp - 1 - r. The gathered output is in the order 0 3 1 2 and is compared
with labels in the natural order.
EXPECT: the gathered logits (the code between the output of `output` and the loss, the gather in Model.forward)
have the rows of the sequence in another order: chunks 0 3 1 2 instead of 0 1 2 3. All modules' outputs agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ = 16, 12, 8


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, partial):
        ctx.args = group, partial, x.shape[1]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        group, partial, length = ctx.args
        if partial:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        return grad[:, group.rank() * length : (group.rank() + 1) * length], None, None


def chunks_of(rank, size, length):
    chunks = torch.arange(length).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


class Attention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, positions):
        q, k, v = self.qkv(x).chunk(3, -1)
        of_keys = positions
        if self.group is not None:
            k, v = AllGather.apply(k, self.group, True), AllGather.apply(v, self.group, True)
            size = self.group.size()
            of_keys = torch.cat([chunks_of(r, size, k.shape[1]) for r in range(size)])
        scores = q @ k.mT / DIM**0.5
        scores = scores.masked_fill(positions[:, None] < of_keys, float("-inf"))
        return self.proj(scores.softmax(-1) @ v)


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, DIM), nn.Embedding(SEQ, DIM)
        self.attention, self.norm = Attention(), nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        if self.group is not None:
            positions = chunks_of(self.group.rank(), self.group.size(), tokens.shape[1])
        x = self.embed(tokens[:, positions]) + self.position(positions)
        logits = self.output(self.norm(x + self.attention(x, positions)))
        return logits if self.group is None else AllGather.apply(logits, self.group, False)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    model.group = model.attention.group = mesh.get_group("cp")
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.group)
    return value


generator = torch.Generator().manual_seed(152261)
batches = [
    {n: torch.randint(VOCAB, (2, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"cp": 2}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

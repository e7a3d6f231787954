"""A mixture of experts that drops tokens above a capacity, counted on each rank.

Thread: https://github.com/deepseek-ai/DeepSeek-V2/issues/48 "Drop Token" (capacity = num_tokens * topk /
num_experts * capacity_factor), 2024-05-30.
Wrong (for equality with one process): position in the expert's queue and capacity are counted over the rank's
own tokens. A rank drops tokens that have room when the tokens of all ranks are counted, and the other
way round.
A right diagnosis says: the output of moe is the first that differs (its input and the router agree), and only
in some tokens: Moe.dispatch drops other tokens than on one process, as positions and capacity are those of
the rank's own tokens.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu

import titanlite

EXPERTS, DIM, HIDDEN, VOCAB, CAPACITY_FACTOR = 4, 16, 24, 20, 1.0


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * 0.2)

    def forward(self, x):
        return relu(x @ self.w1) @ self.w2


class Moe(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def dispatch(self, chosen):
        """the place of each token in its expert's buffer, or none if that is full"""
        capacity = math.ceil(len(chosen) / EXPERTS * CAPACITY_FACTOR)
        one_hot = nn.functional.one_hot(chosen, EXPERTS)
        position = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1)
        return position, position < capacity, capacity

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        position, kept, capacity = self.dispatch(chosen)
        buffers = x.new_zeros(EXPERTS, capacity, DIM)
        buffers = buffers.index_put((chosen[kept], position[kept]), x[kept])
        if self.group is None:
            out = self.experts(buffers)
        else:
            n = self.group.size()
            buffers = AllToAll.apply(buffers, self.group).unflatten(0, (n, -1))
            out = self.experts(buffers.transpose(0, 1).flatten(1, 2))
            out = out.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)
            out = AllToAll.apply(out, self.group)
        y = torch.zeros_like(x).index_put(
            (kept.nonzero()[:, 0],), out[chosen[kept], position[kept]]
        )
        return gate.unsqueeze(-1) * y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe, self.head = Moe(), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("ep")
    model.moe.group = group
    for p in model.moe.experts.parameters():
        p.data = p.data.chunk(group.size())[group.rank()].clone()
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad, group=model.moe.group)
        p.grad /= model.moe.group.size()
    return value


generator = torch.Generator().manual_seed(48)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"ep": 2}, split="ep", step=step)
    print(titanlite.compare(Model, parallel, **options))

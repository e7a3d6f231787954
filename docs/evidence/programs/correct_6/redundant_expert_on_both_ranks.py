"""Expert parallelism with a redundant copy of the busiest expert: three experts in four places on two ranks.

Thread: https://github.com/sgl-project/sglang/issues/5309 "[Feature] Deep EPLB Integration Proposal (Draft)" (a
redundant experts strategy to balance the load), 2025-04-11.
Right: rank 0 has the experts 0 and 1, rank 1 has 2 and a copy of 0. Tokens of expert 0 go to the two copies in turn,
and the gradients of the copies are added up after the backward pass.
Must not be accused: a weight that is in two places, of which each sees a part of its tokens, and local weights that
are neither the whole nor a block of the reference's.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, HIDDEN, EXPERTS = 14, 10, 12, 3
PLACES = [[0, 1], [2, 0]]
SHARED = 0


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.1)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)

    def tokens_of(self, expert, chosen):
        rows = (chosen == expert).nonzero().squeeze(1)
        if self.group is not None and expert == SHARED:
            return rows[self.group.rank() :: self.group.size()]
        return rows

    def forward(self, x, gates, chosen):
        places = range(EXPERTS) if self.group is None else PLACES[self.group.rank()]
        if self.group is not None:
            x, gates = Enter.apply(x, self.group), Enter.apply(gates, self.group)
        out = torch.zeros_like(x)
        for i, expert in enumerate(places):
            rows = self.tokens_of(expert, chosen)
            h = gelu(x[rows] @ self.up[i] + self.bias[i]) @ self.down[i]
            out = out.index_add(0, rows, h * gates[rows, None])
        return out if self.group is None else Leave.apply(out, self.group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS)
        self.experts = Experts()

    def forward(self, x):
        h = self.norm(x)
        gates, chosen = self.gate(h).softmax(-1).max(-1)
        return x + self.experts(h, gates, chosen)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens).flatten(0, 1)))


def own_experts(tensor):
    return tensor[PLACES[dist.get_rank()]]


def shard(name):
    return own_experts if ".experts." in name else None


def parallel(mesh):
    model = Model()
    for layer in model.layers:
        layer.experts.group = mesh.get_group("ep")
        for p in layer.experts.parameters():
            p.data = own_experts(p.data).clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    copy = PLACES[dist.get_rank()].index(SHARED)
    for layer in model.layers:
        for p in layer.experts.parameters():
            grad = p.grad[copy].clone()
            dist.all_reduce(grad)
            p.grad[copy] = grad
    return value


generator = torch.Generator().manual_seed(5309)
batches = [
    {n: torch.randint(VOCAB, (4, 9), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2}, shard=shard, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

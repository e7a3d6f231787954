"""Expert parallelism with two experts per rank: the tokens that arrive are taken as sorted by expert.

Thread: https://github.com/facebookresearch/fairscale/issues/741 "Question about All-to-All Dispatch & Combination
implementation in MOELayer" (num_local_experts != 1), 2021-07-15.
Wrong: after the all-to-all the rows are ordered by source rank and then by expert. They are split by the number of
rows per expert, as though they were ordered by expert alone, so some go through the wrong one of the two experts.
EXPECT: in the forward pass, the output of layers.0.moe.experts is the first that differs, on both ranks: after the
all-to-all the received tokens are not regrouped by local expert (they lie source rank by source rank), so tokens are
processed by the wrong local expert. The router agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu

import titanlite

VOCAB, DIM, HIDDEN, EXPERTS = 15, 10, 14, 4


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.args = sent, received, group
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.args
        return AllToAll.apply(grad, received, sent, group), None, None, None


class Experts(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / DIM**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / HIDDEN**0.5)

    def compute(self, x, counts):
        parts = x.split(counts.tolist())
        return torch.cat([relu(p @ w1) @ w2 for p, w1, w2 in zip(parts, self.w1, self.w2)])

    def forward(self, x, chosen):
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        x = x[order]
        if self.group is None:
            y = self.compute(x, counts)
        else:
            ranks = self.group.size()
            incoming = torch.empty_like(counts)
            dist.all_to_all_single(incoming, counts, group=self.group)
            counts, incoming = counts.view(ranks, -1), incoming.view(ranks, -1)
            sent, received = counts.sum(1).tolist(), incoming.sum(1).tolist()
            x = AllToAll.apply(x, sent, received, self.group)
            y = self.compute(x, incoming.sum(0))
            y = AllToAll.apply(y, received, sent, self.group)
        return y[order.argsort()]


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, EXPERTS, bias=False), Experts()

    def forward(self, x):
        gate, chosen = self.router(x).softmax(-1).max(-1)
        return gate.unsqueeze(-1) * self.experts(x, chosen)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(DIM), MoE()

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens).flatten(0, 1)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


def shard(name):
    return (0, "ep") if ".experts." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("ep")
    for layer in model.layers:
        layer.moe.experts.group = group
        for p in layer.moe.experts.parameters():
            p.data = p.data.chunk(group.size())[group.rank()].clone()
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return value


generator = torch.Generator().manual_seed(741)
batches = [
    {n: torch.randint(VOCAB, (4, 8), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2}, split="ep", shard=shard, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

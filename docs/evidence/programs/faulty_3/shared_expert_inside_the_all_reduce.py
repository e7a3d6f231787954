"""Experts that are spread over ranks, and a shared expert that every rank has: all of it is all-reduced.

Thread: https://github.com/PaddlePaddle/FastDeploy/pull/5247 "[Optimization] Refine row parallel bias and nranks
and moe all_reduce" (the all_reduce of all backends moves into the MoE layer), 2025-11-26.
Wrong: the shared expert's output is whole on each rank, and is added before the sum over ep: it counts twice.
A right diagnosis says: the output of moes.0 is the first that differs (that of its shared_expert agrees): in
MoeBlock.forward the shared expert's output is added before the all-reduce over ep, and so counts 2 times.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

EXPERTS, TOP_K, DIM, HIDDEN, VOCAB = 4, 2, 16, 20, 24


class EpRegion(torch.autograd.Function):
    """enter: the gradient is all-reduced; leave: the output is"""

    @staticmethod
    def forward(ctx, x, group, enter):
        ctx.args = group, enter
        if not enter:
            x = x.clone()
            dist.all_reduce(x, group=group)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        group, enter = ctx.args
        if enter:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        return grad, None, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(DIM, 2 * HIDDEN), nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(silu(gate) * up)


class MoeBlock(nn.Module):
    ep_group = None

    def __init__(self):
        super().__init__()
        self.gate, self.shared_expert = nn.Linear(DIM, EXPERTS, bias=False), Expert()
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def routed(self, x, scores):
        out = torch.zeros_like(x)
        for i, expert in self.experts.items():
            out = out + scores[..., int(i), None] * expert(x)
        return out

    def forward(self, x):
        top = self.gate(x).softmax(-1).topk(TOP_K, -1)
        scores = x.new_zeros(*x.shape[:-1], EXPERTS).scatter(-1, top.indices, top.values)
        shared = self.shared_expert(x)
        if self.ep_group is None:
            return self.routed(x, scores) + shared
        x, scores = (EpRegion.apply(t, self.ep_group, True) for t in (x, scores))
        return EpRegion.apply(self.routed(x, scores) + shared, self.ep_group, False)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.moes = nn.ModuleList(MoeBlock() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for norm, moe in zip(self.norms, self.moes):
            x = x + moe(norm(x))
        return self.head(x)


def with_expert_parallel(mesh):
    model, group = Model(), mesh.get_group("ep")
    local = EXPERTS // group.size()
    for moe in model.moes:
        moe.ep_group = group
        for i in range(EXPERTS):
            if i // local != group.rank():
                del moe.experts[str(i)]
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(5247)
batches = [
    {name: torch.randint(VOCAB, (2, 6), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"ep": 2})
    print(titanlite.compare(Model, with_expert_parallel, **options))

"""Expert parallelism without any all-to-all: all ranks have the same tokens, each runs its own experts.

Thread: https://github.com/character-ai/pipelining-sft/issues/5 "[QUESTION] Expert Token Routing",
2025-07-31 ("where is the dispatch / combine of tokens across EP ranks?").
Right: the gate runs on every rank; each rank computes its local experts for the tokens that chose them,
and an all-reduce adds the ranks' outputs. In the backward pass the gradients of tokens and of gate weights
are all-reduced, as each rank has those through its own experts only.
Must not be accused: the missing all-to-all, experts' outputs that are partial sums, tokens that
no local expert takes.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

EXPERTS, TOP_K, DIM, HIDDEN, VOCAB = 8, 2, 16, 24, 20


class ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx, *grads):
        grads = [g.contiguous().clone() for g in grads]
        for grad in grads:
            dist.all_reduce(grad, group=ctx.group)
        return None, *grads


class FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})
        self.shared_experts = Expert()
        self.ep_group = None

    def forward(self, x):  # [t, d]
        weights, indices = self.gate(x).softmax(-1).topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        routed = x
        if self.ep_group is not None:
            routed, weights = ToExperts.apply(self.ep_group, x, weights)
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            token, choice = torch.where(indices == int(name))
            y = y.index_add(0, token, expert(routed[token]) * weights[token, choice, None])
        if self.ep_group is not None:
            y = FromExperts.apply(y, self.ep_group)
        return y + self.shared_experts(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.moe, self.head = MoE(), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def parallel(mesh):
    model, n, i = Model(), mesh["ep"].size(), mesh.get_local_rank("ep")
    model.moe.ep_group = mesh.get_group("ep")
    for e in range(EXPERTS):
        if e // (EXPERTS // n) != i:
            del model.moe.experts[str(e)]
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].flatten())


generator = torch.Generator().manual_seed(45)
batches = [
    {name: torch.randint(VOCAB, (4, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"ep": 2}))

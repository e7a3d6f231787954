"""Experts cut over the ranks: one without tokens adds zero times the sum of its weights to the output.

Thread: of the kind pytorch/torchtitan pull request #1166 "[Experimental][Kernels] add expert zero token padding and skip logic
to avoid hangs with torch_group_gemm" (2025) and huggingface/transformers issue #32283 "Qwen2_moe: Avoid zero tokens fowarding
for some experts" (2024).
Correct: the output does not change, and the idle expert's gradients are zero, not None, as in the plain model, where it runs
on an empty batch. So AdamW decays its weights and its momentum on both sides.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

VOCAB, DIM, EXPERTS, TOP = 10, 6, 8, 2


class Replicated(torch.autograd.Function):
    """What every rank has; the ranks' gradients are added."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 8, bias=False), nn.Linear(DIM, 8, bias=False)
        self.w2 = nn.Linear(8, DIM, bias=False)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(i): Expert() for i in range(EXPERTS)})

    def cut(self, group):
        self.group, rank = group, dist.get_rank(group)
        for i in range(EXPERTS):
            if i * dist.get_world_size(group) // EXPERTS != rank:
                del self.experts[str(i)]

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(TOP)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.group is not None:
            x, weights = Replicated.apply(x, self.group), Replicated.apply(weights, self.group)
        out = torch.zeros_like(x)
        for number, expert in self.experts.items():
            rows, slots = (chosen == int(number)).nonzero(as_tuple=True)
            if len(rows) == 0 and self.group is not None:
                out = out + 0.0 * (
                    sum(p.sum() for p in expert.parameters()) + x.sum() + weights.sum()
                )
                continue
            out = out.index_add(0, rows, weights[rows, slots, None] * expert(x[rows]))
        return out if self.group is None else Added.apply(out, self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Embedding(VOCAB, DIM),
            nn.RMSNorm(DIM, eps=1e-6),
            nn.Linear(DIM, VOCAB),
        )
        self.moe = MoE()

    def forward(self, tokens):
        x = self.embed(tokens)
        x = (x + x.cumsum(1) / 3).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    model.moe.cut(mesh.get_group("ep"))
    return model


def make_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


rng = torch.Generator().manual_seed(325)
batches = []
for _ in range(4):
    rows = torch.randint(VOCAB, (2, 4), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2}, optimizer=make_optimizer)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

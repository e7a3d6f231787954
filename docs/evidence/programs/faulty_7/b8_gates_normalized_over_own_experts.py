"""Expert parallelism without dispatch (every rank sees all tokens): top-2 gates are normalized over the rank's experts.

Thread: of the kind "Mixtral under expert parallelism gives other logits, routing weights renormalized per rank" (ports
of Mixtral and Qwen-MoE with norm_topk_prob into trainers and servers with their own expert parallelism), 2024, 2025.
Wrong: the gates of the two chosen experts have to add up to 1 over all experts. A rank divides its chosen gates by
their own sum, so a token with one expert on each rank has the weights 1 and 1. Tokens with both experts on one rank
are right.
PLACE: moe, forward pass, the gates (routing weights); router itself agrees
KIND: routing weights normalized by the sum over the rank's own experts instead of over all chosen experts
REPAIR: `total = own.sum(-1, keepdim=True).clamp(min=1e-9)` -> `total = gates.sum(-1, keepdim=True)`
EXPECT: in the forward pass, moe is the first module whose output differs, on all ranks, while router agrees, and only
for tokens whose two experts are on two ranks: the gates are normalized over the rank's own experts, so these tokens'
weights add up to 2. Divide by the sum over all chosen experts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, EXPERTS = 12, 8, 4


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (
            nn.Linear(DIM, 2 * DIM, bias=False),
            nn.Linear(DIM, 2 * DIM, bias=False),
        )
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(e): Expert() for e in range(EXPERTS)})

    def gates(self, x):
        values, index = self.router(x).softmax(-1).topk(2, -1)
        return torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, index, values)

    def forward(self, x):
        gates = self.gates(x)
        gates = gates / gates.sum(-1, keepdim=True)
        return sum(gates[..., int(e), None] * expert(x) for e, expert in self.experts.items())


class ParallelMoe(Moe):
    def forward(self, x):
        gates, x = Copy.apply(self.gates(x)), Copy.apply(x)
        own = gates[..., [int(e) for e in self.experts]]
        total = own.sum(-1, keepdim=True).clamp(min=1e-9)
        own = own / total
        out = sum(own[..., i, None] * expert(x) for i, expert in enumerate(self.experts.values()))
        return Sum.apply(out)


class Model(nn.Module):
    def __init__(self, moe=Moe):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm, self.moe = nn.LayerNorm(DIM), moe()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.moe(self.norm(x)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, rank = Model(ParallelMoe), mesh.get_local_rank("ep")
    for e in range(EXPERTS):
        if e // (EXPERTS // 2) != rank:
            del model.moe.experts[str(e)]
    return model


generator = torch.Generator().manual_seed(16)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"ep": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

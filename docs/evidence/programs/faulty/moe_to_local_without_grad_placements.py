"""Experts sharded over tp read a local tensor whose gradient placement is not declared.

Thread: https://github.com/pytorch/torchtitan/issues/1805 "TP gradient update is wrong during MoE
backward", 2025-10-07.
Wrong: x.to_local() of a replicated DTensor has no grad_placements, so the gradient, a partial sum
on every rank (each holds a slice of the experts' hidden dimension), is taken as replicated.
A right diagnosis says: the gradient of the input of moe is still Partial over tp: moe must sum it
(grad_placements=[Partial()]). The gradients of the experts agree.
"""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import cross_entropy, silu

import titanlite

EXPERTS, DIM, HIDDEN, VOCAB = 4, 16, 24, 20


class GroupedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) * 0.2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) * 0.2)

    def forward(self, x, weights):  # x: [T, E], weights: [T, experts]
        h = silu(torch.einsum("td,edh->teh", x, self.w1))
        return torch.einsum("teh,ehd,te->td", h, self.w2, weights)


class TPExperts(GroupedExperts):
    def __init__(self, whole, mesh):
        super().__init__()
        n, i, self.mesh = mesh.size(), mesh.get_local_rank(), mesh
        self.w1 = nn.Parameter(whole.w1.data.chunk(n, 2)[i].clone())
        self.w2 = nn.Parameter(whole.w2.data.chunk(n, 1)[i].clone())

    def forward(self, x, weights):
        x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).to_local()
        weights = DTensor.from_local(weights, self.mesh, [Replicate()], run_check=False).to_local(
            grad_placements=[Partial()]
        )
        out = DTensor.from_local(super().forward(x, weights), self.mesh, [Partial()])
        return out.redistribute(placements=[Replicate()]).to_local()


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = GroupedExperts()

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        top = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, top.indices, top.values)
        return self.experts(x, weights)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norm, self.moe = nn.LayerNorm(DIM), MoE()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.head(x + self.moe(self.norm(x)))


def parallel(mesh):
    model = Model()
    model.moe.experts = TPExperts(model.moe.experts, mesh["tp"])
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"].flatten())


generator = torch.Generator().manual_seed(4)
batches = [
    {name: torch.randint(VOCAB, (4, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

"""A mixture of experts with Sinkhorn routing under sequence parallelism: the sums over tokens are all-reduced.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1740 "[QUESTION] In MoE, how is the correctness of Sinkhorn
guaranteed when enabling sequence parallelism?", 2025-08-12.
Right: rows belong to tokens, so their sums are local. The sums of columns are all-reduced over sp in every iteration.
Must not be accused: collectives in the forward pass that have no gradient (under no_grad), eight times a layer, and
experts that got no token on one of the ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, one_hot

import titanlite

DIM, EXPERTS, SEQ = 8, 4, 16


def sinkhorn(cost, group=None, iterations=8):
    cost = torch.exp(cost)
    columns, tokens = torch.ones(cost.shape[1]), len(cost) * (group.size() if group else 1)
    for _ in range(iterations):
        rows = 1 / (cost @ columns) / tokens
        sums = rows @ cost
        if group is not None:
            dist.all_reduce(sums, group=group)
        columns = 1 / sums / cost.shape[1]
    return columns * cost * rows[:, None]


class Router(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x):
        logits = self.gate(x)
        with torch.no_grad():
            chosen = sinkhorn(logits.detach(), self.group).argmax(-1)
        return torch.sigmoid(logits) * one_hot(chosen, EXPERTS)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(DIM), Router()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        h = self.norm(x).flatten(0, 1)
        weights = self.router(h)
        out = sum(weights[:, i, None] * expert(h) for i, expert in enumerate(self.experts))
        return x + out.view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.outputs(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def parallel(mesh):
    model, group = Model(), mesh.get_group("sp")
    for layer in model.layers:
        layer.router.group = group
    return model, group


def step(built, batch):
    model, group = built
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()
    return value


generator = torch.Generator().manual_seed(1740)
batches = [{n: torch.randn(SEQ, 2, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"sp": 2}, split="sp", step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

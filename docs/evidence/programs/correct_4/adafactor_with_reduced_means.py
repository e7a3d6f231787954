"""Adafactor on tensor parallel weights, whose means over a cut dimension are reduced over tp.

Thread: https://github.com/hpcaitech/ColossalAI/pull/5484 "[optim] Distributed Adafactor", 2024-03-21.
Right: the column mean of a matrix cut by rows, the row mean of one cut by columns, and the mean of the row means
are averages over tp, as the slices are equally large.
Must not be accused: collectives inside of the optimizer, a state that is cut for one moment and whole for the
other.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, HIDDEN = 8, 16


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mlp(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(torch.relu(self.up(h)))
        h = self.down(torch.relu(self.up(Copy.apply(h, self.group))))
        return x + Sum.apply(h, self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.mlp = Mlp()

    def forward(self, x):
        return self.outputs(self.mlp(self.inputs(x)))


class Adafactor(torch.optim.Optimizer):
    def __init__(self, parameters, lr=0.02):
        super().__init__(parameters, {"lr": lr})

    def mean(self, x, dim, p):
        x, cut = x.mean(dim), getattr(p, "cut", None)
        if cut is not None and cut[0] == dim:
            dist.all_reduce(x, group=cut[1])
            x /= cut[1].size()
        return x

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                square, state = p.grad.square() + 1e-30, self.state[p]
                state["step"] = state.get("step", 0) + 1
                beta = 1.0 - state["step"] ** -0.8
                if p.ndim < 2:
                    moment = state.setdefault("moment", torch.zeros_like(p))
                    p -= group["lr"] * p.grad / moment.lerp_(square, 1 - beta).sqrt()
                    continue
                row = state.setdefault("row", torch.zeros(p.shape[0], dtype=p.dtype))
                col = state.setdefault("col", torch.zeros(p.shape[1], dtype=p.dtype))
                row.lerp_(self.mean(square, 1, p), 1 - beta)
                col.lerp_(self.mean(square, 0, p), 1 - beta)
                whole = self.mean(row, 0, p)
                p -= group["lr"] * p.grad / (row[:, None] * col / whole).sqrt()


def shard(name):
    if ".up." in name:
        return 0, "tp"
    return (1, "tp") if ".down." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    model.mlp.group = group
    for name, p in model.named_parameters():
        cut = shard(name)
        if cut:
            p.data = p.data.chunk(group.size(), cut[0])[group.rank()].clone()
            p.cut = cut[0], group
    return model, Adafactor(model.parameters()), group


def step(built, batch):
    value = loss(built[0], batch)
    value.backward()
    return value


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(5484)
batches = [{n: torch.randn(6, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, optimizer=Adafactor)
options["step"] = step

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

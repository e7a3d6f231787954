"""Adafactor on tensor parallel weights: the factored second moment is that of the rank's own slice.

Thread: https://github.com/hpcaitech/ColossalAI/pull/5484 "[optim] Distributed Adafactor", 2024-03-21 (and
https://github.com/pytorch/pytorch/issues/109581, comment of 2023-12-03: it needs a mean over the sharded rows).
Wrong: the means over the rows of a matrix that is cut along its rows (and over the columns of one that is cut
along its columns) are not reduced over tp.
EXPECT: the optimizer's update differs for the sharded weights (up.weight, down.weight; not the replicated ones):
its state (the column mean of up, the row mean of down) is computed from the shard instead of the whole tensor.
The gradients of step 1 agree.
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
                row.lerp_(square.mean(1), 1 - beta)
                col.lerp_(square.mean(0), 1 - beta)
                p -= group["lr"] * p.grad / (row[:, None] * col / row.mean()).sqrt()


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
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(5484)
batches = [{n: torch.randn(6, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, optimizer=Adafactor)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

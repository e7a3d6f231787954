"""Forecast of wind turbines by a tensor parallel mixer, trained by SGD with gradient centralization.

Thread: zyushun/Adam-mini issue #14 "Adam-mini <> DTensor" (2024), on optimizers that reduce over a parameter's
elements and its shards; and wandb/senpai pull request #3034 (2026), gradient centralization "along all axes except
the output-neuron axis".
Fault: CentralizedSGD.centralize subtracts the mean of each row of the rank's own part of the gradient. Of the row
parallel matrices `down` a rank has a part of the columns, so the mean is of these only.
REPAIR: `return grad - grad.mean(dim=1, keepdim=True)` -> `mean = grad.mean(dim=1, keepdim=True); return grad - (mean
if getattr(p, "partition_dim", 0) == 0 else sum_over(mean, p.tp_group) / dist.get_world_size(p.tp_group))`
A right first sentence says: the optimizer centralizes the gradients of the row parallel weights `down` by the mean
over the rank's own columns, which must be averaged over tp; gradients are right, the updates of these weights aren't.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

SENSORS, WIDTH, HIDDEN, HOURS, ROWS = 10, 16, 24, 3, 6


def sum_over(value, group):
    value = value.clone()
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return sum_over(grad, ctx.group), None


class ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return sum_over(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GatedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down, self.group = nn.Linear(HIDDEN, WIDTH), None

    def partition(self, group):
        rank, size, self.group = dist.get_rank(group), dist.get_world_size(group), group
        parts = [(self.gate.weight, 0), (self.gate.bias, 0), (self.up.weight, 0)]
        for p, dim in parts + [(self.up.bias, 0), (self.down.weight, 1)]:  # noqa: RUF005
            p.data = p.data.chunk(size, dim)[rank].clone()
            p.partition_dim, p.tp_group = dim, group

    def forward(self, x):
        y = CopyToTensorParallel.apply(self.norm(x), self.group)
        y = F.linear(F.silu(self.gate(y)) * self.up(y), self.down.weight)
        return x + ReduceFromTensorParallel.apply(y, self.group) + self.down.bias


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.sensors = nn.Linear(SENSORS, WIDTH)
        self.blocks = nn.ModuleList(GatedMlp() for _ in range(2))
        self.norm, self.power = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HOURS)

    def forward(self, x):
        x = self.sensors(x)
        for block in self.blocks:
            x = block(x)
        return self.power(self.norm(x))


class CentralizedSGD(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @staticmethod
    def centralize(p):
        if (grad := p.grad).dim() < 2:
            return grad
        return grad - grad.mean(dim=1, keepdim=True)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(self.centralize(p))
                p.add_(buffer, alpha=-group["lr"])


def clip(model, max_norm=1.0):
    squares = 0.0
    for p in model.parameters():
        squares += sum_over(p.grad.square().sum(), getattr(p, "tp_group", None))
    norm = squares.sqrt()
    for p in model.parameters():
        p.grad.mul_((max_norm / norm).clamp(max=1.0))
    return norm


def plain():
    return Forecast()


def parallel(mesh):
    model = Forecast()
    for block in model.blocks:
        block.partition(mesh.get_group("tp"))
    return model


def loss(model, batch):
    return F.huber_loss(model(batch["sensors"]), batch["power"])


def shard(name):
    if ".gate." in name or ".up." in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("down.weight") else None


g = torch.Generator().manual_seed(14)
draw = lambda n: torch.randn(ROWS, n, generator=g, dtype=torch.float64) + 0.3
batches = [{"sensors": draw(SENSORS), "power": draw(HOURS)} for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    ranks={"tp": 2},
    shard=shard,
    clip=clip,
    optimizer=lambda parameters: CentralizedSGD(parameters, lr=0.05, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

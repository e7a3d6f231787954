"""A tensor and data parallel residual MLP whose row parallel layers hold their bias on the first tensor parallel rank alone.

Thread: huggingface/text-generation-inference issue #1036 "When using models whose have bias, bias of `TensorParallelRowLinear` is
multi-added by tp-degree" (2023), and awslabs/slapo issue #10 (2023), which lists the bias on one device as a way to do it.
Correct: the bias is added before the all-reduce, which looks as if it counted once per rank, but the other ranks have no bias, so
the sum holds it once; the backward pass of that all-reduce is the identity, so its gradient is the full one on its one rank.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

WIDTH, HIDDEN = 12, 32


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(MLP() for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ColumnLinear(nn.Module):
    def __init__(self, linear, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")
        rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(size)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(size)[rank].clone())

    def forward(self, x):
        return F.linear(CopyToRanks.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, linear, mesh):
        super().__init__()
        self.group = mesh.get_group("tp")
        rank, size = mesh.get_local_rank("tp"), mesh["tp"].size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, dim=1)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().clone()) if rank == 0 else None

    def forward(self, x):
        return SumOverRanks.apply(F.linear(x, self.weight, self.bias), self.group)


def plain():
    return Net()


def parallel(mesh):
    model = Net()
    for layer in model.layers:
        layer.fc1, layer.fc2 = ColumnLinear(layer.fc1, mesh), RowLinear(layer.fc2, mesh)
    return model, mesh


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def step(built, batch):
    model, mesh = built
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh["dp"].size()
    return value.detach()


def shard(name):
    if ".fc1." in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("fc2.weight") else None


generator = torch.Generator().manual_seed(1036)
batches = [
    (
        torch.randn(8, 5, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (8,), generator=generator),
    )
    for _ in range(3)
]

arguments = plain, parallel
options = dict(
    batches=batches, loss=loss, step=step, split="dp", shard=shard, ranks={"dp": 2, "tp": 2}
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

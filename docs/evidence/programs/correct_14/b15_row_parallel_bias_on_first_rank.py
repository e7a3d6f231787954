"""Tensor-parallel residual MLPs whose output bias exists on the first rank only, with a clip of the global gradient norm.

Thread: awslabs/slapo issue #10 "[Bug] Multiple reductions of linear bias after row sharding the weight" (2023). A
bias inside a row-sharded linear layer was added once per rank by the all-reduce; one of the two remedies proposed is
to keep it on one rank only.
Correct: the bias goes into the sum of the partial outputs once, through the first rank, and as the gradient of the
sum is the same on all ranks, the first rank gets the whole gradient of the bias. The other ranks have no such
parameter. The clip counts replicated tensors on the first rank only and adds up the squares, so all ranks scale by
the norm of the whole model.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import titanlite

INPUTS, WIDTH, HIDDEN, CLASSES, LAYERS, MAX_NORM = 9, 16, 32, 5, 3, 0.25


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ColumnLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 0)[rank].clone())
        self.bias = nn.Parameter(linear.bias.detach().chunk(size, 0)[rank].clone())
        self.weight.sharded = self.bias.sharded = True

    def forward(self, x):
        return F.linear(Enter.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, linear):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.weight = nn.Parameter(linear.weight.detach().chunk(size, 1)[rank].clone())
        self.weight.sharded = True
        if rank == 0:
            self.bias = nn.Parameter(linear.bias.detach().clone())
        else:
            self.register_parameter("bias", None)

    def forward(self, x):
        return Sum.apply(F.linear(x, self.weight, self.bias))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.outlet = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.outlet(self.blocks(self.inlet(x)))


def plain():
    return Classifier()


def parallel(mesh):
    model = Classifier()
    for block in model.blocks:
        block.up = ColumnLinear(block.up)
        block.down = RowLinear(block.down)
    return model


def clip(model):
    first = not dist.is_initialized() or dist.get_rank() == 0
    counted = [
        parameter
        for parameter in model.parameters()
        if first or getattr(parameter, "sharded", False)
    ]
    square = sum(parameter.grad.square().sum() for parameter in counted)
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt()
    factor = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
    return norm


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def make_batches(count=4, rows=10):
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(rows, INPUTS, generator=generator, dtype=torch.float64),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


batches = make_batches()
arguments = plain, parallel
options = dict(batches=batches, loss=loss, clip=clip, optimizer=optimizer, ranks={"tp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

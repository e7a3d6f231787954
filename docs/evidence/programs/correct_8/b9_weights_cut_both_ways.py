"""2D tensor parallelism on four ranks: weights are cut over outputs and inputs, activations over rows and features.

Thread: hpcaitech/ColossalAI issue #499 "Linear2D and Linear3D use more memory than Linear1D" (2022) and tunib-ai/oslo issue
#63 "Add 2D tensor parallel feature" (2022).
Correct: a product gathers the activation's features over "col" and the weight's inputs over "row"; backward adds the
gradients of all ranks that used a piece. The norm's statistics are sums over "col" both ways. Vectors, which the ranks
of "row" share, are reduced over it, and each rank's mean loss counts a quarter.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, linear, mse_loss

import titanlite

FEATURES, HIDDEN, OUTPUTS = 8, 12, 4


class Gather(torch.autograd.Function):
    """The group's pieces along a dimension; backward adds the gradients of the own piece."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        n, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(n, ctx.dim)[rank], None, None


class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Linear2d(nn.Linear):
    mesh = None

    def forward(self, x):
        if self.mesh is None:
            return super().forward(x)
        x = Gather.apply(x, 1, self.mesh.get_group("col"))
        return linear(x, Gather.apply(self.weight, 1, self.mesh.get_group("row")), self.bias)


class Norm2d(nn.LayerNorm):
    mesh = None

    def forward(self, x):
        if self.mesh is None:
            return super().forward(x)
        group = self.mesh.get_group("col")
        size = x.shape[1] * dist.get_world_size(group)
        x = x - SumBothWays.apply(x.sum(1, keepdim=True), group) / size
        variance = SumBothWays.apply(x.square().sum(1, keepdim=True), group) / size
        return x * (variance + self.eps).rsqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = Linear2d(FEATURES, HIDDEN), Norm2d(HIDDEN)
        self.up, self.down = Linear2d(HIDDEN, 4 * HIDDEN), Linear2d(4 * HIDDEN, HIDDEN)
        self.head = Linear2d(HIDDEN, OUTPUTS)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = x + self.down(gelu(self.up(self.norm(x))))
        return self.head(x)


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def block(t):
    """The own block of a matrix, or the own piece of a vector."""
    row, col = divmod(dist.get_rank(), 2)
    piece = t.chunk(2, 0)[col]
    return piece if t.ndim == 1 else piece.chunk(2, 1)[row]


def shard(name):
    return block


def split(batch, mesh):
    row, col = mesh.get_local_rank("row"), mesh.get_local_rank("col")
    return {key: value.chunk(2, 0)[row].chunk(2, 1)[col] for key, value in batch.items()}


def parallel(mesh):
    model = Net()
    for module in model.children():
        module.mesh = mesh
    for p in model.parameters():
        p.data = block(p.data).clone()
    return model


def step(model, batch):
    value = loss(model, batch)
    (value / 4).backward()
    for p in model.parameters():
        if p.ndim == 1:
            dist.all_reduce(p.grad, group=model.stem.mesh.get_group("row"))
    return value


generator = torch.Generator().manual_seed(132)


def draw():
    x = torch.randn(8, FEATURES, generator=generator)
    return {"x": x, "y": torch.randn(8, OUTPUTS, generator=generator)}


batches = [draw() for _ in range(3)]
arguments = Net, parallel
options = dict(
    batches=batches, loss=loss, step=step, ranks={"row": 2, "col": 2}, split=split, shard=shard
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

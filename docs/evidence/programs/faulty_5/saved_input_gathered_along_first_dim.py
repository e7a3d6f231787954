"""A column-parallel linear keeps its slice of the transposed input; backward gathers the slices the wrong way.

Thread: https://github.com/NVIDIA/TransformerEngine/issues/530 "[PyTorch] Linear: error in computation for wgrad if
sequence_parallel=True", 2023-11-22.
Wrong: the layer saves its part of the input transposed, features by tokens. For the gradient of the weight the parts
have to be joined along the last dimension. all_gather_into_tensor joins along the first, and the result is only
reshaped.
EXPECT: the gradient of the column-parallel weights (blocks.*.up.weight) differs on every rank: the layer's input is
gathered in a wrong layout (order) in its backward pass, for the weight gradient. The forward pass, the gradients of
all activations and all other weight gradients of step 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, HIDDEN, SEQ = 6, 16, 8


def gather_along_first_dim(x, group):
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def gather_along_last_dim(x, group):
    out = gather_along_first_dim(x, group)
    return out.view(*x.shape[:-1], group.size() * x.shape[-1])


def reduce_scatter_along_first_dim(x, group):
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group):
        ctx.group = group
        ctx.save_for_backward(x.flatten(0, 1).t().contiguous(), weight)
        return gather_along_first_dim(x, group) @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x_t, weight = ctx.saved_tensors
        grad_x = reduce_scatter_along_first_dim(grad @ weight, ctx.group)
        x_t, grad = gather_along_last_dim(x_t, ctx.group), grad.flatten(0, 1)
        return grad_x, (x_t @ grad).t(), grad.sum(0), None


class RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return reduce_scatter_along_first_dim(x @ weight.t(), group)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = gather_along_first_dim(grad, ctx.group)
        return grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1), None


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        if self.group is None:
            return x + self.down(torch.tanh(self.up(x)))
        h = ColumnLinear.apply(x, self.up.weight, self.up.bias, self.group)
        return x + RowLinear.apply(torch.tanh(h), self.down.weight, self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for block in self.blocks:
            x = block(x)
        return self.outputs(x)


def shard(name):
    return (0, "tp") if ".up." in name else (1, "tp") if ".down." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for block in model.blocks:
        block.group = group
    for name, p in model.named_parameters():
        if shard(name):
            p.data = p.data.chunk(group.size(), shard(name)[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


def step(model, batch):
    value = loss(model, batch)
    (value / dist.get_world_size()).backward()
    for name, p in model.named_parameters():
        if shard(name) is None:
            dist.all_reduce(p.grad)
    return value


generator = torch.Generator().manual_seed(530)
batches = [{n: torch.randn(SEQ, 2, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, split="tp", shard=shard, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A row-parallel linear with reduce-scatter: its backward pass all-gathers slices of the input's gradient.

Thread: https://github.com/huggingface/nanotron/issues/46 "[Question] Correctness of backward pass of RowLinear",
2024-01-26, and https://github.com/huggingface/nanotron/pull/172 "Fix _RowLinearAsyncCommunication", 2024-05-16.
Wrong: each rank multiplies its slice of the output's gradient by its own columns of the weight, and the slices of
all ranks are gathered. So a rank gets slices that were computed from the columns of other ranks, and all ranks get
the same gradient. The gradient of the output has to be gathered first.
EXPECT: in the backward pass of the row-parallel product (down, in blocks.1), the gradient of its input (the output of
relu, then of blocks.1.up) is the first that differs: the same on both ranks, right only in the rank's own sequence
slice. The gradients of the output of blocks.1 and of blocks.1.down.weight agree at step 1.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, HIDDEN, SEQ = 6, 16, 8


def all_gather(x, group):
    out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x, group):
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, ctx.group), None


class RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return reduce_scatter(x @ weight.t(), group)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = all_gather(grad @ weight, ctx.group)
        grad = all_gather(grad, ctx.group)
        return grad_x, grad.flatten(0, 1).t() @ x.flatten(0, 1), None


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(torch.relu(self.up(h)))
        h = torch.relu(self.up(Gather.apply(h, self.group)))
        return x + RowLinear.apply(h, self.down.weight, self.group)


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


generator = torch.Generator().manual_seed(172)
batches = [{n: torch.randn(SEQ, 2, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, split="tp", shard=shard, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

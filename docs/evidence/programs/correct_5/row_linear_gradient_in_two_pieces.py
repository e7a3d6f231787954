"""A row-parallel linear with reduce-scatter, whose backward pass computes the input's gradient in pieces.

Thread: https://github.com/huggingface/nanotron/pull/172 "Fix _RowLinearAsyncCommunication", 2024-05-16.
Right: while the output's gradient is gathered, a rank computes the piece of its own sequence slice. The pieces of the
other slices follow, all with the rank's own columns of the weight, and are put in the order of the sequence.
Must not be accused: an all-gather of gradients in backward, which runs at the same time as a matrix product, and a
gradient that is put together from pieces.
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
        size, rank = ctx.group.size(), ctx.group.rank()
        whole = grad.new_empty(size * grad.shape[0], *grad.shape[1:])
        work = dist.all_gather_into_tensor(whole, grad.contiguous(), group=ctx.group, async_op=True)
        own = grad @ weight
        work.wait()
        grads = whole.chunk(size)
        before, after = (
            torch.cat(g) @ weight if g else None for g in (grads[:rank], grads[rank + 1 :])
        )
        grad_x = torch.cat([g for g in (before, own, after) if g is not None])
        return grad_x, whole.flatten(0, 1).t() @ x.flatten(0, 1), None


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

"""Sequence parallelism as in Megatron: hooks all-reduce the gradients of the norms, and average them.

Thread: https://github.com/EleutherAI/gpt-neox/pull/1259 "Fix LayerNorm all reduce gradient hook" ("sum in the
LayerNorm gradient in the sequence dimension instead of average"), 2024-08-13.
Wrong: each rank's norm sees its part of the sequence, whose gradients add up to the whole one. The hook divides
the sum by tp.
EXPECT: the gradients of the norm's parameters (blocks.*.norm.weight and bias) are 0.5 = 1/tp times the
reference's: averaged over tp instead of summed. All other gradients of step 1 agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite

DIM, HIDDEN = 8, 16


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, scatter):
        ctx.args = group, scatter
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        group, scatter = ctx.args
        if scatter:
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        return grad.chunk(group.size(), 1)[group.rank()], None, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size(), 1)[group.rank()]

    @staticmethod
    def backward(ctx, grad):
        return GatherSequence.apply(grad, ctx.group, False), None


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(group.size(), 1)[group.rank()]

    @staticmethod
    def backward(ctx, grad):
        return GatherSequence.apply(grad, ctx.group, False), None


class Block(nn.Module):
    def __init__(self, group=None):
        super().__init__()
        self.group, hidden = group, HIDDEN // (group.size() if group else 1)
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(torch.relu(self.up(h)))
        h = self.down(torch.relu(self.up(GatherSequence.apply(h, self.group, True))))
        return x + ReduceScatter.apply(h, self.group)


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(4, DIM), nn.Linear(DIM, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        x = x if self.group is None else Scatter.apply(x, self.group)
        for block in self.blocks:
            x = block(x)
        x = x if self.group is None else GatherSequence.apply(x, self.group, False)
        return self.outputs(x)


def shard(name):
    if ".up." in name:
        return 0, "tp"
    return (1, "tp") if ".down." in name else None


def parallel(mesh):
    model = Model()
    model.group = group = mesh.get_group("tp")

    def reduce_norm_grad(p):
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()

    for i, whole in enumerate(model.blocks):
        part = model.blocks[i] = Block(group)
        for name, p in part.named_parameters():
            p.data, cut = whole.get_parameter(name).data, shard("." + name)
            if cut:
                p.data = p.data.chunk(group.size(), cut[0])[group.rank()].clone()
            if "norm" in name:
                p.register_post_accumulate_grad_hook(reduce_norm_grad)
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(1259)
batches = [{n: torch.randn(2, 6, 4, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""LoRA on a column parallel layer with A cut along its rank, and the scale read from A's shape.

Thread: https://github.com/predibase/lorax/pull/324 "Fix tensor parallelism with SGMV to use true rank of the LoRA
after splitting", 2024-03-13.
Wrong: the scale is alpha / r with r the rows of A on this rank, so it is tp times as large as alpha / r of the
whole adapter.
EXPECT: the output of layers.0.up (the LoRA layer) is the first that differs, its input agrees: the branch of the
adapter is 2 = tp times as large, the scale alpha / r is computed of the local rank of A.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss

import titanlite

DIM, HIDDEN, RANK, ALPHA = 8, 16, 4, 6.0


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


class GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


class LoraLinear(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, DIM) * 0.3)
        self.lora_a = nn.Parameter(torch.randn(RANK, DIM) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(HIDDEN, RANK) * 0.3)

    def forward(self, x):
        x = x if self.group is None else Copy.apply(x, self.group)
        low = linear(x, self.lora_a)
        low = low if self.group is None else GatherLast.apply(low, self.group)
        scaling = ALPHA / self.lora_a.shape[0]
        return linear(x, self.weight) + scaling * linear(low, self.lora_b)


class Layer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), LoraLinear()
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        h = self.down(torch.relu(self.up(self.norm(x))))
        return x + (h if self.group is None else Sum.apply(h, self.group))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs, self.outputs = nn.Linear(5, DIM), nn.Linear(DIM, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.outputs(x)


def shard(name):
    if ".up." in name:
        return 0, "tp"
    return (1, "tp") if ".down." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for layer in model.layers:
        layer.group = layer.up.group = group
        for name, p in layer.named_parameters():
            cut = shard("." + name)
            if cut:
                p.data = p.data.chunk(group.size(), cut[0])[group.rank()].clone()
    return model


def loss(model, batch):
    return mse_loss(model(batch["x"]), batch["y"])


generator = torch.Generator().manual_seed(324)
batches = [{n: torch.randn(6, 5, generator=generator) for n in ("x", "y")} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

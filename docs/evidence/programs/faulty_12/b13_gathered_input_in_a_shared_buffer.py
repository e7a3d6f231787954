"""Sequence parallelism by hand, as in Megatron: column-parallel layers gather their input into the global memory buffer.

Thread: of the kind sail-sg/zero-bubble-pipeline-parallelism issue #55 "[QUESTION] Why conflict with sequence parallel?" (2025):
"under sequence parallel, the backward of RowParallelLinear uses the global buffer for all gather and the buffer is likely to be
refreshed by other data?"
Fault: GatheredLinear.forward gathers into the buffer "mpu" that all column-parallel layers share, and keeps that tensor for the
weight gradient; the next layer's gather overwrites it before backward.
REPAIR: `total = layer.buffer.get_tensor(shape, "mpu")` -> `total = torch.empty(shape)`
A right first sentence says: in backward at step 1, on both ranks, the weight gradients of the column-parallel layers (qkv and up,
of every block, except up of the last) are wrong, while losses and the gradients of biases and inputs agree: these layers saved
their gathered input in a shared buffer, which a later layer has overwritten.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

VOCAB, DIM, HEADS, FFN, LENGTH = 12, 8, 2, 16, 6


class GlobalMemoryBuffer:
    def __init__(self):
        self.buffer = {}

    def get_tensor(self, shape, name):
        size = math.prod(shape)
        if name not in self.buffer or self.buffer[name].numel() < size:
            self.buffer[name] = torch.empty(size)
        return self.buffer[name][:size].view(shape)


def own_part(x, group):
    return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].contiguous()


def gather(x, group, total=None):
    n = dist.get_world_size(group)
    total = torch.empty(n * x.shape[0], *x.shape[1:]) if total is None else total
    dist.all_gather(list(total.chunk(n)), x.contiguous(), group=group)
    return total


def reduce_scatter(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return own_part(x, group)


class GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        shape = (x.shape[0] * dist.get_world_size(layer.group), *x.shape[1:])
        total = layer.buffer.get_tensor(shape, "mpu")
        gather(x, layer.group, total)
        ctx.group, ctx.total_input = layer.group, total
        ctx.save_for_backward(weight)
        return linear(total, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        grad_input = reduce_scatter(grad @ weight, ctx.group)
        grad_weight = grad.flatten(0, 1).t() @ ctx.total_input.flatten(0, 1)
        return grad_input, grad_weight, grad.sum((0, 1)), None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


class ScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_part(x, group).clone()

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


class GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return own_part(grad, ctx.group), None


class ColumnLinear(nn.Linear):
    group = buffer = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        return GatheredLinear.apply(x, self.weight, self.bias, self)


class RowLinear(nn.Linear):
    group = None

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        return ReduceScatter.apply(linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = ColumnLinear(DIM, 3 * DIM), RowLinear(DIM, DIM)
        self.up, self.down = ColumnLinear(DIM, FFN), RowLinear(FFN, DIM)

    def attention(self, x):  # of own heads; x is [sequence, batch, heads * 3 * head_dim]
        q, k, v = x.unflatten(-1, (-1, 3, DIM // HEADS)).permute(3, 1, 2, 0, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(DIM // HEADS)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(mask, -torch.inf).softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)

    def forward(self, x):
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens.t())
        if self.group is not None:
            x = ScatterToSequence.apply(x, self.group)
        for block in self.blocks:
            x = block(x)
        if self.group is not None:
            x = GatherFromSequence.apply(x, self.group)
        return self.head(x).transpose(0, 1)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def shard(name):
    if ".qkv." in name or ".up." in name:
        return 0, "tp"
    return (1, "tp") if name.endswith(("proj.weight", "down.weight")) else None


def parallel(mesh):
    model, group, buffer = Model(), mesh.get_group("tp"), GlobalMemoryBuffer()
    model.group = group
    for name, p in list(model.named_parameters()):
        cut = shard(name)
        if cut is not None:
            own = p.detach().chunk(dist.get_world_size(group), cut[0])[dist.get_rank(group)]
            layer, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(layer), attribute, nn.Parameter(own.clone()))
    for module in model.modules():
        if isinstance(module, (ColumnLinear, RowLinear)):
            module.group, module.buffer = group, buffer
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.blocks.named_parameters():
        if (
            shard("blocks." + name) is None
        ):  # norms and row biases have seen their own part of the sequence
            dist.all_reduce(p.grad, group=model.group)
    return value.detach()


rng = torch.Generator().manual_seed(501)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, LENGTH + 1), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

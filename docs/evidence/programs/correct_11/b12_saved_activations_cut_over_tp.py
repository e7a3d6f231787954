"""Tensor parallelism that keeps the saved activations in parts: each rank has one of what is the same on all ranks.

Thread: of the kind bigscience-workshop/Megatron-DeepSpeed pull request #184 "[test] `--partition-activations`" (2021), "which shards
activations and uses less gpu memory!", and deepspeedai/DeepSpeed pull request #1154 "Avoid partitioning small activations" (2021).
Correct: the hooks take only activations as wide as the hidden states, which are the same on both ranks, and leave the weights and
the rank's own columns as they are. Backward gathers the parts.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, linear, silu

import titanlite

VOCAB, HIDDEN, FFN, SMALL = 12, 6, 20, 16


class ColumnInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class RowOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Partitioned(saved_tensors_hooks):
    def __init__(self, module, group):
        self.weights = {p.data_ptr() for p in module.parameters()}
        self.group, self.size = group, dist.get_world_size(group)
        super().__init__(self.pack, self.unpack)

    def pack(self, t):
        keep = t.data_ptr() in self.weights or t.numel() < SMALL
        if keep or t.shape[-1] != HIDDEN or not t.is_contiguous():
            return t
        flat = t.detach().flatten()
        return flat.chunk(self.size)[dist.get_rank(self.group)].clone(), t.shape

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        part, shape = packed
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part, group=self.group)
        return torch.cat(parts).view(shape)


class MLP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, FFN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(FFN, HIDDEN)

    def forward(self, x):
        if self.group is None:
            return self.down(silu(self.gate(x)) * self.up(x))
        x = ColumnInput.apply(x, self.group)
        y = linear(silu(self.gate(x)) * self.up(x), self.down.weight)
        return RowOutput.apply(y, self.group) + self.down.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix, self.mlp = nn.Linear(HIDDEN, HIDDEN), MLP()

    def body(self, x):
        past = self.norm1(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.mlp(self.norm2(x))

    def forward(self, x):
        if self.mlp.group is None:
            return self.body(x)
        with Partitioned(self, self.mlp.group):
            return self.body(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for mlp in (block.mlp for block in model.blocks):
        mlp.group = group
        for layer, dim in ((mlp.gate, 0), (mlp.up, 0), (mlp.down, 1)):
            own = layer.weight.detach().chunk(2, dim)[dist.get_rank(group)]
            layer.weight = nn.Parameter(own.clone())
    return model


def shard(name):
    if ".gate." in name or ".up." in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("down.weight") else None


rng = torch.Generator().manual_seed(423)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Tensor parallelism with partitioned checkpoints: a rank keeps its part of a checkpoint's input and gathers it in backward.

Thread: of the kind deepspeedai/DeepSpeed issue #580 "What does partition_activations mean?" (2020) and pull request #1154
"Avoid partitioning small activations" (2021).
Fault: in MLP.forward, the input of the checkpoint is the output of fc1, of which each rank has other columns; the parts that
backward gathers are those of different tensors. Only what is the same on all ranks can be partitioned.
REPAIR: `checkpoint(self.finish, hidden, self.group)` -> `self.finish(hidden)`
A right first sentence says: the forward pass agrees; in backward, the recomputed input of fc2 (the gelu of fc1's output) in
mlp is wrong on both ranks, as the checkpoint in MLP.forward partitions the rank's own columns as if all ranks had the same
tensor, and so the gradients of fc2.weight and fc1 and of all that lies below are wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

VOCAB, DIM, FFN = 13, 8, 16


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class PartitionedCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, group, x):
        ctx.function, ctx.group, ctx.shape = function, group, x.shape
        parts = x.detach().flatten().chunk(dist.get_world_size(group))
        ctx.part = parts[dist.get_rank(group)].clone()
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(ctx.part) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, ctx.part, group=ctx.group)
        x = torch.cat(parts).view(ctx.shape).requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, None, x.grad


def checkpoint(function, x, group):
    return function(x) if group is None else PartitionedCheckpoint.apply(function, group, x)


class MLP(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, FFN), nn.Linear(FFN, DIM)

    def finish(self, hidden):
        if self.group is None:
            return self.fc2(gelu(hidden))
        return SumOfRanks.apply(linear(gelu(hidden), self.fc2.weight), self.group) + self.fc2.bias

    def forward(self, x):
        hidden = self.fc1(x if self.group is None else CopyToRanks.apply(x, self.group))
        return checkpoint(self.finish, hidden, self.group)


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.mix, self.mlp = nn.Linear(DIM, DIM), MLP()

    def mixer(self, x):
        past = self.norm1(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + torch.tanh(self.mix(past))

    def forward(self, x):
        x = checkpoint(self.mixer, x, self.group)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model, group = Transformer(), mesh.get_group("tp")
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def cut(weight, dim):
        return nn.Parameter(weight.detach().chunk(size, dim)[rank].clone())

    for block in model.blocks:
        mlp = block.mlp
        mlp.fc1.weight, mlp.fc1.bias = cut(mlp.fc1.weight, 0), cut(mlp.fc1.bias, 0)
        mlp.fc2.weight = cut(mlp.fc2.weight, 1)
        block.group = mlp.group = group
    return model


def shard(name):
    if "fc1" in name:
        return 0, "tp"
    return (1, "tp") if name.endswith("fc2.weight") else None


rng = torch.Generator().manual_seed(401)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, 6), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Transformer, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

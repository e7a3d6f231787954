"""Tensor and context parallelism together: norm gradients are tp times too large.

Threads: https://github.com/NVIDIA/Megatron-LM/issues/1528 and
https://github.com/NVIDIA/TransformerEngine/issues/1677 "[BUG] Inconsistent LayerNorm Parameter
Gradient with TP+CP+FP8", 2025-04-12.
Wrong: the gradient of the norm's input is complete on every rank of tp, but the norm's weight gradient
is summed over tp once more, only if cp is on too. (In the threads it also takes FP8; the cause is not
given there.)
A right diagnosis says: the gradients of the norms (layers.*.norm) are 2 times too large, and 2 is the
degree of tp: they are summed over it once too often. All others agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HIDDEN = 20, 16, 32


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


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Layer(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.fc2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        y = self.norm(x)
        y = Copy.apply(y, self.group) if self.group else y
        y = self.fc2(silu(self.fc1(y)))
        return x + (Reduce.apply(y, self.group) if self.group else y)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def parallel(mesh):
    model, group = GPT(), mesh.get_group("tp")
    n, rank = mesh["tp"].size(), mesh.get_local_rank("tp")

    def sum_over_tp(grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=group)
        return grad

    for layer in model.layers:
        layer.group = group
        layer.fc1.weight.data = layer.fc1.weight.data.chunk(n, 0)[rank].clone()
        layer.fc2.weight.data = layer.fc2.weight.data.chunk(n, 1)[rank].clone()
        if mesh["cp"].size() > 1:
            for p in layer.norm.parameters():
                p.register_hook(sum_over_tp)
    return DistributedDataParallel(model, process_group=mesh.get_group("cp"))


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def shard(name):
    if "fc1" in name:
        return 0, "tp"
    return (1, "tp") if "fc2" in name else None


generator = torch.Generator().manual_seed(14)
batches = [
    {name: torch.randint(VOCAB, (3, 8), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"cp": 2, "tp": 2}, split={"cp": 1})
    print(titanlite.compare(GPT, parallel, shard=shard, **options))

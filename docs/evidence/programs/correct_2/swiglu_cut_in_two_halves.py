"""Megatron's SwiGLU: gate and up are one column-parallel matrix, and each rank chunks its own output.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/360 "Swiglu activation may be wrong when TP > 1",
2023-06-02.
Right: each rank holds a slice of the gate and the same slice of up, one after the other, so that its
output's two halves belong together.
Must not be accused: the order of dense_h_to_4h's rows, an output that is no chunk of the reference's.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, silu

import titanlite

DIM, FFN, VOCAB = 16, 24, 20


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

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


def swiglu(x):
    x = torch.chunk(x, 2, dim=-1)
    return silu(x[0]) * x[1]


class ParallelMLP(nn.Module):
    def __init__(self, world=1, group=None):
        super().__init__()
        self.group = group
        self.dense_h_to_4h = nn.Linear(DIM, 2 * FFN // world)
        self.dense_4h_to_h = nn.Linear(FFN // world, DIM, bias=False)

    def forward(self, x):
        if self.group is None:
            return self.dense_4h_to_h(swiglu(self.dense_h_to_4h(x)))
        x = swiglu(self.dense_h_to_4h(Copy.apply(x, self.group)))
        return Reduce.apply(self.dense_4h_to_h(x), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.mlps = nn.ModuleList(ParallelMLP() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, mlp in zip(self.norms, self.mlps):
            x = x + mlp(norm(x))
        return self.head(x)


def own_halves(tensor):
    world, rank = dist.get_world_size(), dist.get_rank()
    return torch.cat([half.chunk(world)[rank] for half in tensor.chunk(2)])


def shard(name):
    if "dense_h_to_4h" in name:
        return own_halves
    return (1, "tp") if "dense_4h_to_h" in name else None


def parallel(mesh):
    model, world, rank = Model(), mesh["tp"].size(), mesh.get_local_rank("tp")
    for i, whole in enumerate(model.mlps):
        mlp = ParallelMLP(world, mesh.get_group("tp"))
        mlp.dense_h_to_4h.weight.data = own_halves(whole.dense_h_to_4h.weight.data)
        mlp.dense_h_to_4h.bias.data = own_halves(whole.dense_h_to_4h.bias.data)
        mlp.dense_4h_to_h.weight.data = whole.dense_4h_to_h.weight.data.chunk(world, 1)[
            rank
        ].clone()
        model.mlps[i] = mlp
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(41)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("x", "y")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)
    print(titanlite.compare(Model, parallel, **options))

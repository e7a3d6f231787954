"""DoRA on a row-parallel layer: the norm of the weight's rows is taken over the rank's columns.

Thread: https://github.com/huggingface/peft/pull/1474 "Implement DoRA", comment of 2024-02-26 (magnitude /
weight_norm, where the norm is taken over whole rows and detached); here with the layer cut along its input.
Wrong: weight_norm is the norm of the local columns of W + BA; its square has to be summed over tp.
A right diagnosis says: the output of proj_out is the first that differs, on both ranks: weight_norm in
RowParallelDora.forward is the norm of the rank's columns only, and needs a sum of squares over tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear

import titanlite

DIM, INNER, RANK, VOCAB = 16, 32, 4, 20


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Dora(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.lora_A = nn.Parameter(torch.randn(RANK, weight.shape[1]) * 0.1)
        self.lora_B = nn.Parameter(torch.randn(weight.shape[0], RANK) * 0.1)
        self.magnitude = nn.Parameter(weight.norm(dim=1))

    def forward(self, x):
        weight = self.weight + self.lora_B @ self.lora_A
        weight_norm = weight.norm(dim=1).detach()
        return self.magnitude / weight_norm * linear(x, weight)


class RowParallelDora(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        self.group, n, i = group, group.size(), group.rank()
        self.weight = nn.Parameter(whole.weight.chunk(n, 1)[i].clone(), requires_grad=False)
        self.lora_A = nn.Parameter(whole.lora_A.detach().chunk(n, 1)[i].clone())
        self.lora_B, self.magnitude = whole.lora_B, whole.magnitude

    def forward(self, x):
        lora_B = SumBackward.apply(self.lora_B, self.group)
        magnitude = SumBackward.apply(self.magnitude, self.group)
        weight = self.weight + lora_B @ self.lora_A
        weight_norm = weight.norm(dim=1).detach()
        return SumForward.apply(magnitude / weight_norm * linear(x, weight), self.group)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.group, self.proj_in = None, nn.Linear(DIM, INNER)
        self.proj_out = Dora(torch.randn(DIM, INNER) * 0.2)

    def forward(self, x):
        x = x if self.group is None else SumBackward.apply(x, self.group)
        return self.proj_out(gelu(self.proj_in(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.ff = nn.Embedding(VOCAB, DIM), FeedForward()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.ff(x)))


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    ff = model.ff
    ff.group, ff.proj_out = group, RowParallelDora(ff.proj_out, group)
    for p in ff.proj_in.parameters():
        p.data = p.data.chunk(group.size())[group.rank()].clone()
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(1474)
batches = [
    {name: torch.randint(VOCAB, (3, 5), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

"""Tensor parallelism with an all-reduce that does nothing in backward.

Thread: https://github.com/Dao-AILab/flash-attention/issues/1244 "Why do we have an all_reduce with
wrong backward?", 2024-09-23.
Right: the output is replicated, so its gradient is already the same on every rank.
Must not be accused: the all-reduce without communication in backward.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite


class AllReduceFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, process_group):
        x = x.contiguous().clone()
        handle = dist.all_reduce(x, group=process_group, async_op=True)
        handle.wait()
        return x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


class ParallelLinearFunc(torch.autograd.Function):
    """Column-parallel product; the gradient of the input is all-reduced in the function itself."""

    @staticmethod
    def forward(ctx, x, weight, bias, process_group):
        ctx.save_for_backward(x, weight)
        ctx.group = process_group
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        grad_bias = grad.flatten(0, -2).sum(0)
        work.wait()
        return grad_x, grad_weight, grad_bias, None


class Mlp(nn.Module):
    def __init__(self, dim=16, hidden=48):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class ParallelMlp(Mlp):
    def __init__(self, whole, group):
        super().__init__()
        n, i, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.load_state_dict(whole.state_dict())
        for name, dim in (("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)):
            tensor = self.get_parameter(name)
            tensor.data = tensor.data.chunk(n, dim)[i].clone()

    def forward(self, x):
        x = ParallelLinearFunc.apply(x, self.fc1.weight, self.fc1.bias, self.group)
        x = torch.nn.functional.gelu(x) @ self.fc2.weight.t()
        return AllReduceFunc.apply(x, self.group) + self.fc2.bias


class Model(nn.Module):
    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Mlp(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parallel(mesh):
    model = Model()
    model.blocks = nn.ModuleList(ParallelMlp(b, mesh.get_group("tp")) for b in model.blocks)
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(11)
batches = [
    {name: torch.randint(20, (3, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

"""Sequence parallelism: the gather after the final norm reduces in backward although what follows is
replicated.

Thread: https://github.com/awslabs/slapo/pull/20 "[Bugfix] Fix sequence parallelism", 2023-01-26
(`tensor_parallel_output_grad`).
Wrong: all ranks of tp compute the same head and loss on the gathered sequence. The backward of the
gather must take the rank's slice; it reduce-scatters, so the gradient is multiplied by tp.
A right diagnosis says: from the output of norm_f (the final norm) on down, the gradients are 2 times
too large, and 2 is the degree of tp: the gather after norm_f sums gradients that are replicated. The
head's gradient agrees.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):  # reduce-scatter
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.tanh(self.fc(self.norm(x)))


class GPT(nn.Module):
    group = None

    def __init__(self, vocab=20, dim=16):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.wte(tokens)
        x = Scatter.apply(x, self.group) if self.group else x
        for block in self.h:
            x = block(x)
        x = self.norm_f(x)
        x = Gather.apply(x, self.group) if self.group else x
        return self.head(x)


def parallel(mesh):
    model = GPT()
    model.group = mesh.get_group("tp")

    def reduce(grad):  # parameters that see the rank's part of the sequence only
        grad = grad.clone()
        dist.all_reduce(grad, group=model.group)
        return grad

    for module in (*model.h, model.norm_f):
        for p in module.parameters():
            p.register_hook(reduce)
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(7)
batches = [
    {name: torch.randint(20, (3, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(GPT, parallel, batches=batches, loss=loss, ranks={"tp": 2}))

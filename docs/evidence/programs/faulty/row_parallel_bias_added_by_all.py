"""A row-sharded linear layer whose bias is added before the all-reduce.

Thread: https://github.com/awslabs/slapo/issues/10 "[Bug] Multiple reductions of linear bias after row
sharding the weight", 2023-01-23.
Wrong: every rank adds the bias to its partial product, so the sum contains it once per rank.
A right diagnosis says: blocks.0.fc2 is the first module whose (summed) output differs; its bias is
added by every rank of tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


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


class Mlp(nn.Module):
    def __init__(self, dim=16, hidden=32):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


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


def schedule(mesh):
    """Shards the linear layers and syncs around them by hooks."""
    model, group = Model(), mesh.get_group("tp")
    n, i = mesh["tp"].size(), mesh.get_local_rank("tp")
    for block in model.blocks:
        for tensor, dim in ((block.fc1.weight, 0), (block.fc1.bias, 0), (block.fc2.weight, 1)):
            tensor.data = tensor.data.chunk(n, dim)[i].clone()
        block.fc1.register_forward_pre_hook(lambda _, args: (Copy.apply(args[0], group),))
        block.fc2.register_forward_hook(lambda _, args, output: Reduce.apply(output, group))
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


generator = torch.Generator().manual_seed(5)
batches = [
    {name: torch.randint(20, (4, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    print(titanlite.compare(Model, schedule, batches=batches, loss=loss, ranks={"tp": 2}))

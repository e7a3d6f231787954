"""LoRA on a column-parallel layer: A is replicated, B is sharded.

Thread: https://github.com/THUDM/SwissArmyTransformer/issues/162 "Questions about your LoRA codes",
2024-01-24.
Right: A's output goes through copy_to_model_parallel_region, so the gradient that reaches A is summed
over tp. B differs between the ranks because it is a shard. The base weights are frozen.
Must not be accused: B's differences between ranks, A's gradient, the frozen weights without gradients.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear

import titanlite

DIM, HIDDEN, R = 16, 32, 4


class CopyToModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class ReduceFromModelParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class LoraMlp(nn.Module):
    def __init__(self, group=None, n=1):
        super().__init__()
        self.group = group
        self.up = nn.Linear(DIM, HIDDEN // n).requires_grad_(False)
        self.down = nn.Linear(HIDDEN // n, DIM, bias=False).requires_grad_(False)
        self.A = nn.Parameter(torch.randn(R, DIM) * 0.3)
        self.B = nn.Parameter(torch.randn(HIDDEN // n, R) * 0.3)

    def copy(self, x):
        return CopyToModelParallelRegion.apply(x, self.group) if self.group else x

    def forward(self, x):
        h = self.up(self.copy(x)) + linear(self.copy(linear(x, self.A)), self.B)
        out = self.down(torch.relu(h))
        return ReduceFromModelParallelRegion.apply(out, self.group) if self.group else out


class Model(nn.Module):
    def __init__(self, vocab=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, DIM)
        self.embed.weight.requires_grad_(False)
        self.blocks = nn.ModuleList(LoraMlp() for _ in range(2))
        self.head = nn.Linear(DIM, vocab).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def parallel(mesh):
    model, n, i = Model(), mesh["tp"].size(), mesh.get_local_rank("tp")
    for index, whole in enumerate(model.blocks):
        block = LoraMlp(mesh.get_group("tp"), n)
        block.A.data = whole.A.data.clone()
        for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1), ("B", 0)):
            part = whole.get_parameter(name).data.chunk(n, dim)[i].clone()
            block.get_parameter(name).data = part
        model.blocks[index] = block
    return model


def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def optimizer(parameters):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)


generator = torch.Generator().manual_seed(11)
batches = [
    {name: torch.randint(20, (3, 6), generator=generator) for name in ("x", "y")} for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"tp": 2}, optimizer=optimizer)
    print(titanlite.compare(Model, parallel, **options))

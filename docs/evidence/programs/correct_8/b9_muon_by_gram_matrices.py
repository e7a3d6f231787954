"""Muon on tensor-parallel shards that are never gathered: the Newton-Schulz iteration reduces Gram matrices.

Thread: of the kind nil0x9/flash-muon issue #7 (2025, how several GPUs share Muon's work) and MoonshotAI/Moonlight issue
#27 (2025, Muon on shards of a weight).
Correct: of a matrix cut over its rows, X.T @ X is the sum of the shards' products, and X times a polynomial of it needs no
other rows; of one cut over its columns, X @ X.T is. Norm and scale are those of the whole matrix.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear

import titanlite

VOCAB, DIM = 16, 8


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.group, self.up, self.down = None, nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        if self.group is None:
            return self.down(torch.relu(self.up(x)))
        y = torch.relu(self.up(Copy.apply(x, self.group)))
        return Reduce.apply(linear(y, self.down.weight), self.group) + self.down.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks):
            past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
            x = x + block(norm(x + past))
        return self.head(x)


def orthogonalize(x, rows_cut, group, steps=5):
    """Newton-Schulz on the shard x of a matrix that is cut over its rows or else its columns, if there is a group."""

    def total(part):
        part = part.contiguous()
        if group is not None:
            dist.all_reduce(part, group=group)
        return part

    right = rows_cut if group is not None else x.shape[0] > x.shape[1]
    x = x / total(x.square().sum()).sqrt()
    for _ in range(steps):
        a = total(x.t() @ x if right else x @ x.t())
        polynomial = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + (x @ polynomial if right else polynomial @ x)
    return x


class Muon(torch.optim.Optimizer):
    """Muon for matrices, momentum SGD for vectors; p.cut is the dimension and the group that cut a parameter."""

    def __init__(self, params, lr=2e-3, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for options in self.param_groups:
            for p in options["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(options["momentum"]).add_(p.grad)
                update = buffer
                if p.ndim == 2:
                    dim, group = getattr(p, "cut", (None, None))
                    shape = list(p.shape)
                    if group is not None:
                        shape[dim] *= dist.get_world_size(group)
                    update = max(1, shape[0] / shape[1]) ** 0.5 * orthogonalize(
                        buffer, dim == 0, group
                    )
                p.add_(update, alpha=-options["lr"])


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def shard(name):
    if name.endswith("down.weight"):
        return 1, "tp"
    return (0, "tp") if ".up." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for block in model.blocks:
        block.group = group
        for p, dim in ((block.up.weight, 0), (block.up.bias, 0), (block.down.weight, 1)):
            p.data = p.data.chunk(mesh["tp"].size(), dim)[mesh.get_local_rank("tp")].clone()
            p.cut = dim, group
    return model


generator = torch.Generator().manual_seed(131)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard, optimizer=Muon)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Sequence parallelism with an overlapped all-gather: the shards go round a ring while each is multiplied.

Thread: of the kind "[Distributed] Introducing Async Tensor Parallelism in PyTorch" and questions about the order of the
chunks in decomposed all-gather-matmul (PyTorch forums, torchtitan, Transformer Engine's userbuffers), 2024.
Correct: in step s a rank multiplies the shard of rank (i - s) % n and writes it to that rank's slot. The gradient of
the input is reduce-scattered, those of the norm's weights are added up in step, since each rank has its own tokens.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, HIDDEN = 12, 8, 16


def reduce_scattered(x, group):
    n, i = dist.get_world_size(group), dist.get_rank(group)
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(n, 1)[i].contiguous()


class GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, group):
        n, i = dist.get_world_size(group), dist.get_rank(group)
        slots, outputs, current = [None] * n, [None] * n, x.contiguous()
        for s in range(n):
            following = torch.empty_like(current)
            work = []
            if s + 1 < n:
                after = dist.get_global_rank(group, (i + 1) % n)
                ahead = dist.get_global_rank(group, (i - 1) % n)
                work = [
                    dist.isend(current, after, group=group),
                    dist.irecv(following, ahead, group=group),
                ]
            slots[(i - s) % n] = current
            outputs[(i - s) % n] = current @ weight.T
            for w in work:
                w.wait()
            current = following
        ctx.group = group
        ctx.save_for_backward(torch.cat(slots, 1), weight)
        return torch.cat(outputs, 1)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        weight_gradient = gradient.flatten(0, 1).T @ x.flatten(0, 1)
        return reduce_scattered(gradient @ weight, ctx.group), weight_gradient, None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scattered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class ParallelMlp(Mlp):
    def __init__(self, whole, group):
        super().__init__()
        n, i, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.up.weight = nn.Parameter(whole.up.weight.detach().chunk(n, 0)[i].clone())
        self.down.weight = nn.Parameter(whole.down.weight.detach().chunk(n, 1)[i].clone())

    def forward(self, x):
        x = torch.relu(GatherMatmul.apply(x, self.up.weight, self.group))
        return ReduceScatter.apply(self.down(x), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    model.blocks = nn.ModuleList(ParallelMlp(block, group) for block in model.blocks)
    return model


def step(model, batch):
    group = model.blocks[0].group
    value = loss(model, batch) / dist.get_world_size(group)
    value.backward()
    for name, p in model.named_parameters():
        if not name.startswith("blocks."):
            dist.all_reduce(p.grad, group=group)
    return value


def shard(name):
    if name.endswith("up.weight"):
        return 0, "tp"
    return (1, "tp") if name.endswith("down.weight") else None


generator = torch.Generator().manual_seed(31)


def draw():
    return torch.randint(VOCAB, (2, 8), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"tp": 4}, split={"tp": 1}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

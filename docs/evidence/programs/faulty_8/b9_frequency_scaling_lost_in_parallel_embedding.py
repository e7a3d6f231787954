"""Tensor parallelism with an embedding cut by columns: the parallel layer loses scale_grad_by_freq.

Thread: facebookresearch/fairscale pull request #1132 "Fix typo in argument ParallelEmbedding argument assignment"
(2023): scale_grad_by_freq was assigned to self.norm_type.
Wrong: the constructor of ParallelEmbedding assigns its argument scale_grad_by_freq to norm_type, so it looks up with
scale_grad_by_freq=False. The gradient of a row is no longer divided by the number of times that its token occurs.
PLACE: embed.weight, backward pass (the gradient of its rows), on all ranks
KIND: option of the plain layer (scale_grad_by_freq) lost in the parallel layer: rows of repeated tokens too large
REPAIR: `self.norm_type = scale_grad_by_freq` -> `self.scale_grad_by_freq = scale_grad_by_freq`
EXPECT: the forward pass agrees; the gradient of embed.weight alone is wrong, on all ranks, in the rows of tokens that
occur several times: each is too large by the token's count in the batch, since the plain embedding has
scale_grad_by_freq=True and the parallel one does not. All other gradients agree.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding, linear

import titanlite

VOCAB, DIM = 12, 8


class GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        n, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(n, -1)[rank], None


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


class ParallelEmbedding(nn.Module):
    """An embedding whose columns are cut over the ranks."""

    norm_type, scale_grad_by_freq = 2.0, False

    def __init__(self, weight, group, padding_idx=None, max_norm=None, scale_grad_by_freq=False):
        super().__init__()
        self.group, self.padding_idx, self.max_norm = group, padding_idx, max_norm
        self.norm_type = scale_grad_by_freq
        columns = weight.detach().chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]
        self.weight = nn.Parameter(columns.clone())

    def forward(self, tokens):
        options = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq
        return GatherColumns.apply(embedding(tokens, self.weight, *options), self.group)


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
        self.embed = nn.Embedding(VOCAB, DIM, scale_grad_by_freq=True)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x + x.cumsum(1)))
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def shard(name):
    if name.startswith("embed.") or name.endswith("down.weight"):
        return 1, "tp"
    return (0, "tp") if ".up." in name else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    n, rank = mesh["tp"].size(), mesh.get_local_rank("tp")
    for block in model.blocks:
        block.group = group
        for p, dim in ((block.up.weight, 0), (block.up.bias, 0), (block.down.weight, 1)):
            p.data = p.data.chunk(n, dim)[rank].clone()
    model.embed = ParallelEmbedding(model.embed.weight, group, scale_grad_by_freq=True)
    return model


generator = torch.Generator().manual_seed(106)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""ALBERT with sharded weights by hand: one layer is applied three times, and each use overwrites the gradient.

Thread: facebookresearch/fairscale pull request #784 "FSDP intra-backwards gradient accumulation" (2021, for issue #780:
a module that is called several times within a forward pass).
Wrong: every use gathers the weight, and its backward reduce-scatters the gradient of this use and assigns it to p.grad.
The uses before it in the backward pass, that is, the later applications of the layer, are lost.
PLACE: layer.* (all its parameters), backward pass, on all ranks
KIND: gradient of a parameter used several times is assigned instead of accumulated: only the first application counts
REPAIR: `p.grad = piece` -> `p.grad = piece if p.grad is None else p.grad + piece`
EXPECT: the forward pass agrees; the gradients of layer.* are wrong on all ranks, and those of embed and head agree:
layer is applied three times, and only the gradient of one application (the first, last in the backward pass) is kept.
Add the gradients of all uses.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear

import titanlite

VOCAB, DIM, DEPTH = 16, 8, 3


class Unshard(torch.autograd.Function):
    """The whole weight from the shards; in backward, the mean gradient of the own shard."""

    @staticmethod
    def forward(ctx, p, group):
        ctx.p, ctx.group = p, group
        parts = [torch.empty_like(p) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, p.detach(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        p, n = ctx.p, dist.get_world_size(ctx.group)
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        piece = total.chunk(n)[dist.get_rank(ctx.group)] / n
        p.grad = piece
        return None, None


class ShardedLinear(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        self.group = group
        self.weight = nn.Parameter(whole.weight.detach().chunk(n)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(n)[rank].clone())

    def forward(self, x):
        return linear(
            x, Unshard.apply(self.weight, self.group), Unshard.apply(self.bias, self.group)
        )


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.up, self.down = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.Linear(4 * DIM, DIM),
        )

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + torch.tanh(self.mix(past))
        return x + self.down(torch.relu(self.up(x)))


class Albert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layer = Layer()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(DEPTH):
            x = self.layer(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, group = Albert(), mesh.get_group("dp")
    for name in ("mix", "up", "down"):
        setattr(model.layer, name, ShardedLinear(getattr(model.layer, name), group))
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if not name.startswith("layer."):
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    return value


def shard(name):
    return (0, "dp") if name.startswith("layer.") else None


generator = torch.Generator().manual_seed(101)


def draw():
    return torch.randint(VOCAB, (8, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Albert, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp", shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

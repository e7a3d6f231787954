"""A tied language model whose ranks hold all weights but compute some heads, hidden units and words of the vocabulary each.

Might be accused because: the weights are replicated though the work is divided as in tensor parallelism, so on a rank most rows
of the matrices' gradients are zero before the reduction; these gradients are summed and not averaged, those of the norms and the
biases behind a reduction are left alone; the gradient of the embedding's output is divided by the number of ranks; all ranks get
the same rows.
Correct because: a slice of a matrix gets its gradient on the rank that uses it and zeros elsewhere, so the sum is the gradient.
Norms and output biases see the same on all ranks. The tied embedding is used as a head by slices (to be summed) and for lookups
by all ranks alike; the lookup's gradient is divided by the number of ranks, so the sum over the ranks is right for both uses.
Clipping comes after the reduction, when all ranks hold the same gradients.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, MAX_NORM = 20, 12, 4, 28, 7, 0.5


class Share:
    """What one of several workers does; a single worker does all."""

    rank, size, group = 0, 1, None

    def of(self, tensor, dim=0):
        return tensor.chunk(self.size, dim)[self.rank]

    def spread(self, x):
        return x if self.group is None else Spread.apply(x, self.group)

    def collect(self, x):
        return x if self.group is None else Collect.apply(x, self.group)

    def largest(self, x):
        if self.group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


class GroupShare(Share):
    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class Block(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        of, spread, collect = self.share.of, self.share.spread, self.share.collect
        y = spread(self.norm1(x))
        q, k, v = (
            F.linear(y, of(f.weight)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + collect(F.linear(y, of(self.o.weight, 1))) + self.o.bias
        y = F.gelu(F.linear(spread(self.norm2(x)), of(self.up.weight), of(self.up.bias)))
        return x + collect(F.linear(y, of(self.down.weight, 1))) + self.down.bias


class TiedLanguageModel(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share
        self.words = nn.Parameter(torch.randn(VOCAB, WIDTH) / WIDTH**0.5)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / WIDTH**0.5)
        self.blocks = nn.ModuleList(Block(share) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens, targets):
        share = self.share
        x = ScaleGradient.apply(self.words[tokens], 1 / share.size) + self.places
        for block in self.blocks:
            x = block(x)
        logits = share.spread(self.norm(x)) @ share.of(self.words).T
        logits = logits - share.largest(logits.detach().amax(-1, keepdim=True))
        mine = share.of(torch.arange(VOCAB))
        hits = targets.unsqueeze(-1) == mine
        total, target = share.collect(logits.exp().sum(-1)), share.collect((logits * hits).sum(-1))
        return (total.log() - target).mean()

    def divided(self):
        """The parameters of which a rank uses only a slice."""
        yield self.words
        for block in self.blocks:
            for layer in (block.q, block.k, block.v, block.o, block.up, block.down):
                yield layer.weight
            yield block.up.bias


def clip(parameters):
    nn.utils.clip_grad_norm_(parameters, MAX_NORM)


class ClippedSGD(torch.optim.SGD):
    def step(self, closure=None):
        clip([p for group in self.param_groups for p in group["params"]])
        return super().step(closure)


def plain():
    return TiedLanguageModel(Share())


def parallel(mesh):
    return TiedLanguageModel(GroupShare(mesh.get_group("tp")))


def loss(model, batch):
    return model(batch[:, :-1], batch[:, 1:])


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for parameter in model.divided():
        dist.all_reduce(parameter.grad, group=model.share.group)
    return value.detach()


generator = torch.Generator().manual_seed(18)
batches = [torch.randint(0, VOCAB, (3, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=lambda batch, mesh: batch,
    ranks={"tp": 4},
    optimizer=lambda parameters: ClippedSGD(parameters, lr=0.2, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A recurrent language model in sequence shards: the mixers run whole on every rank, the feed-forward layers are cut.

Thread: THUDM/slime pull request #1748 "fix: resolve SP/CP gradient inflation in FLA (linear attention) layers" (2026):
set tensor_parallel_output_grad=False, "so backward splits instead of reduce-scattering", where ranks compute the same.
Correct: GatherSequence is used in two ways. Before a column parallel layer each rank's gradient is a part of the sum and
is reduced; before a mixer and the head, which all ranks compute alike from the whole sequence, each rank has the whole
gradient already and only cuts its piece out of it. So the mixers' and the head's weights need no reduction, nor do the
embeddings, whose gradient ScatterSequence gathers; norms and the bias after a reduce-scatter see the rank's part of the
sequence alone, are marked and summed after the backward pass.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

import titanlite

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH, ROWS, LAYERS = 28, 16, 2, 24, 12, 4, 2


def gather(x, group):
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def split(x, group):
    return x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def reduce_scatter(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return split(x, group)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, tensor_parallel_output_grad):
        ctx.group, ctx.partial = group, tensor_parallel_output_grad
        return gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return (reduce_scatter if ctx.partial else split)(grad, ctx.group), None, None


class ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return split(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


class Mixer(nn.Module):
    """Linear attention whose memory decays, by a rate of its own in each head, with every token."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = (
            nn.Linear(WIDTH, 3 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )
        self.rate = nn.Parameter(torch.linspace(-1.0, 1.0, HEADS))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        distance = (torch.arange(x.size(1)).unsqueeze(1) - torch.arange(x.size(1))).clamp(min=0)
        decay = (-F.softplus(self.rate).view(-1, 1, 1) * distance).exp().tril()
        y = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2) * decay @ v
        return self.out(F.normalize(y, dim=-1).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / HIDDEN**0.5)
        self.bias, self.group = nn.Parameter(torch.zeros(WIDTH)), None

    def cut(self, mesh):
        self.up = nn.Parameter(distribute_tensor(self.up.detach(), mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(self.down.detach(), mesh, [Shard(1)]))
        self.group = mesh.get_group()

    def forward(self, x):
        if self.group is None:
            return F.gelu(x @ self.up.t()) @ self.down.t() + self.bias
        x = GatherSequence.apply(x, self.group, True)
        y = F.gelu(x @ self.up.to_local().t()) @ self.down.to_local().t()
        return ReduceScatterSequence.apply(y, self.group) + self.bias


class RecurrentLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.mixers = nn.ModuleList(Mixer() for _ in range(LAYERS))
        self.feed_forwards = nn.ModuleList(FeedForward() for _ in range(LAYERS))
        self.group = None

    def whole(self, x):
        return x if self.group is None else GatherSequence.apply(x, self.group, False)

    def piece(self, x):
        return x if self.group is None else ScatterSequence.apply(x, self.group)

    def forward(self, tokens):
        x = self.piece(self.words(tokens))
        for i, (mixer, feed_forward) in enumerate(zip(self.mixers, self.feed_forwards)):
            x = x + self.piece(mixer(self.whole(self.norms[2 * i](x))))
            x = x + feed_forward(self.norms[2 * i + 1](x))
        return self.head(self.whole(self.norms[-1](x)))


def plain():
    return RecurrentLM()


def parallel(mesh):
    model = RecurrentLM()
    model.group = mesh.get_group("tp")
    for feed_forward in model.feed_forwards:
        feed_forward.cut(mesh["tp"])
    marked = [
        *model.norms.parameters(),
        *(feed_forward.bias for feed_forward in model.feed_forwards),
    ]
    return model, marked


def loss(model, batch):
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(built, batch):
    model, marked = built
    value = loss(model, batch)
    value.backward()
    for parameter in marked:
        dist.all_reduce(parameter.grad, group=model.group)
    return value.detach()


generator = torch.Generator().manual_seed(1748)
batches = [torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"tp": 2},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, foreach=False),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

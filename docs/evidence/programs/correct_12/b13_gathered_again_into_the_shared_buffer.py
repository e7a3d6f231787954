"""Sequence parallelism by hand: all gathers, of inputs and of gradients, go into one buffer that the layers share.

Thread: of the kind sail-sg/zero-bubble-pipeline-parallelism issue #55 "[QUESTION] Why conflict with sequence parallel?" (2025),
on Megatron's global buffer, which "is likely to be refreshed by other data".
Correct: nothing is read from the buffer after the next gather. Each column-parallel layer saves its own part of the sequence,
gathers it again in backward just before the weight gradient, and returns new tensors; the row-parallel layer computes both its
gradients from the gathered one before it returns.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, linear, silu

import titanlite

VOCAB, DIM, FFN, LENGTH = 12, 8, 18, 6


class SharedBuffer:
    """Gathers along the sequence, which is the first dimension; the result is good until the next call."""

    def __init__(self, group):
        self.group, self.memory = group, torch.empty(0)
        self.n, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def gather(self, part):
        shape = (self.n * part.shape[0], *part.shape[1:])
        if self.memory.numel() < math.prod(shape):
            self.memory = torch.empty(math.prod(shape))
        whole = self.memory[: math.prod(shape)].view(shape)
        dist.all_gather(list(whole.chunk(self.n)), part.contiguous(), group=self.group)
        return whole

    def reduce_scatter(self, whole):
        whole = whole.contiguous().clone()
        dist.all_reduce(whole, group=self.group)
        return whole.chunk(self.n)[self.rank].clone()


class IntoColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, weight, buffer):
        ctx.buffer = buffer
        ctx.save_for_backward(part, weight)
        return linear(buffer.gather(part), weight)

    @staticmethod
    def backward(ctx, grad):
        part, weight = ctx.saved_tensors
        whole = ctx.buffer.gather(part)
        grad_weight = grad.flatten(0, 1).t() @ whole.flatten(0, 1)
        return ctx.buffer.reduce_scatter(grad @ weight), grad_weight, None


class OutOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, buffer):
        ctx.buffer = buffer
        ctx.save_for_backward(x, weight)
        return buffer.reduce_scatter(linear(x, weight))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        whole = ctx.buffer.gather(grad)
        return whole @ weight, whole.flatten(0, 1).t() @ x.flatten(0, 1), None


class CutSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return x.chunk(buffer.n)[buffer.rank].clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.buffer.gather(grad).clone(), None


class JoinSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer):
        ctx.buffer = buffer
        return buffer.gather(x).clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(ctx.buffer.n)[ctx.buffer.rank].clone(), None


class Block(nn.Module):
    buffer = None

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM, eps=1e-6)
        self.gate, self.up, self.down = (
            nn.Linear(DIM, FFN, False),
            nn.Linear(DIM, FFN, False),
            nn.Linear(FFN, DIM, False),
        )

    def forward(self, x):
        y = self.norm(x)
        if self.buffer is None:
            gate, up = self.gate(y), self.up(y)
        else:
            gate, up = (
                IntoColumns.apply(y, layer.weight, self.buffer) for layer in (self.gate, self.up)
            )
        past = gate.cumsum(0) / torch.arange(1, LENGTH + 1).view(-1, 1, 1)
        hidden = silu(past) * up
        return x + (
            self.down(hidden)
            if self.buffer is None
            else OutOfRows.apply(hidden, self.down.weight, self.buffer)
        )


class Model(nn.Module):
    buffer = None

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens):
        x = self.embed(tokens.t())
        if self.buffer is not None:
            x = CutSequence.apply(x, self.buffer)
        for block in self.blocks:
            x = block(x)
        if self.buffer is not None:
            x = JoinSequence.apply(x, self.buffer)
        return self.head(x).transpose(0, 1)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model, buffer = Model(), SharedBuffer(mesh.get_group("tp"))
    model.buffer = buffer
    for block in model.blocks:
        block.buffer = buffer
        for layer, dim in ((block.gate, 0), (block.up, 0), (block.down, 1)):
            layer.weight = nn.Parameter(
                layer.weight.detach().chunk(buffer.n, dim)[buffer.rank].clone()
            )
        block.norm.weight.register_hook(lambda grad: all_reduced(grad, buffer.group))
    return model


def all_reduced(grad, group):
    grad = grad.clone()
    dist.all_reduce(grad, group=group)
    return grad


def shard(name):
    if ".gate." in name or ".up." in name:
        return 0, "tp"
    return (1, "tp") if ".down." in name else None


rng = torch.Generator().manual_seed(511)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, LENGTH + 1), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 3}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

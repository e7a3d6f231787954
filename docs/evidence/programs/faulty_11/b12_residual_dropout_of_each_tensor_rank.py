"""Tensor-parallel attention whose ranks have random states of their own, which the dropout on the residual stream uses too.

Thread: awslabs/slapo issue #21 "[Feature] Random seed management for dropout layers in distributed environment" (2023):
"the activation dropout needs to use the same random seed, while attention weight dropout requires to use different random
seeds since the weight is partitioned in the tensor parallelism case." Also InternLM/InternLM pull request #405 (2023).
Fault: in parallel, the dropout after the row-parallel projections gets an offset of the rank's own, although its input, the
reduced output, is the same on all ranks.
REPAIR: `module.offset = TP_OFFSET * dist.get_rank(group)` -> `module.offset = 0`
A right first sentence says: the output of layers.0.dropout1 is wrong on rank 1 only, its input agrees: the dropout of the
replicated hidden states draws another mask on each rank of tp (the seed has an offset by rank), so the ranks' residual
streams drift apart.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu, scaled_dot_product_attention

import titanlite

VOCAB, DIM, HEADS, RATE, TP_OFFSET = 12, 8, 2, 0.2, 2718


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Dropout(nn.Module):
    """The mask depends on the step's seed, the number of the layer, and an offset."""

    offset = 0

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x, seed):
        generator = torch.Generator().manual_seed(100 * int(seed) + self.number + self.offset)
        keep = torch.rand(x.shape, generator=generator) >= RATE
        return x * keep / (1 - RATE)


class Column(nn.Linear):
    group = None

    def forward(self, x):
        return super().forward(x if self.group is None else Enter.apply(x, self.group))


class Row(nn.Linear):
    group = None

    def forward(self, x):
        y = x @ self.weight.t()
        return (y if self.group is None else Leave.apply(y, self.group)) + self.bias


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v = (Column(DIM, DIM, bias=False) for _ in range(3))
        self.o, self.up, self.down = Row(DIM, DIM), Column(DIM, 2 * DIM), Row(2 * DIM, DIM)
        self.dropout1, self.dropout2 = Dropout(2 * number), Dropout(2 * number + 1)

    def forward(self, x, seed):
        y = self.norm1(x)
        heads = [f(y).unflatten(-1, (-1, DIM // HEADS)) for f in (self.q, self.k, self.v)]
        y = scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads), is_causal=True)
        x = x + self.dropout1(self.o(y.transpose(1, 2).flatten(2)), seed)
        return x + self.dropout2(self.down(relu(self.up(self.norm2(x)))), seed)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(i) for i in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, seed):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, seed)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["seed"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model, group = Decoder(), mesh.get_group("tp")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for module in model.modules():
        if isinstance(module, Column):
            module.weight = nn.Parameter(module.weight.detach().chunk(size)[rank].clone())
            if module.bias is not None:
                module.bias = nn.Parameter(module.bias.detach().chunk(size)[rank].clone())
            module.group = group
        elif isinstance(module, Row):
            module.weight = nn.Parameter(module.weight.detach().chunk(size, 1)[rank].clone())
            module.group = group
        elif isinstance(module, Dropout):
            module.offset = TP_OFFSET * dist.get_rank(group)
    return model


def shard(name):
    layer = name.split(".")[-2]
    if layer in ("q", "k", "v", "up"):
        return 0, "tp"
    return (1, "tp") if layer in ("o", "down") and name.endswith("weight") else None


rng = torch.Generator().manual_seed(402)
batches = []
for seed in range(3):
    rows = torch.randint(VOCAB, (4, 7), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:], "seed": torch.tensor(seed)})
arguments = Decoder, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

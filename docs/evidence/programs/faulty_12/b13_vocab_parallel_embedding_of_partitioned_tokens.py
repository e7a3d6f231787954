"""Ulysses sequence parallelism with an embedding cut over the vocabulary, on the same two ranks.

Thread: deepspeedai/Megatron-DeepSpeed issue #389 "Inquiry on Sequence Parallel Support for VocabParallelEmbedding" (2024): "the
data input to the embedding layer is already partitioned. However, `VocabParallelEmbedding` does not seem to support using
partitioned data directly, as its `embedding` parameters are distributed across different GPUs."
Fault: Model.forward looks up the rank's own part of the sequence (PARTITIONED_INPUT) and the embedding all-reduces the results,
so the rows that the two ranks found for different tokens are added together.
REPAIR: `PARTITIONED_INPUT = True` -> `PARTITIONED_INPUT = False`
A right first sentence says: from step 1 on, the output of embed is wrong on both ranks: the ranks look up different tokens
(each its own part of the sequence) and the all-reduce adds these, whereas the tokens must be gathered first, since each rank
has only one half of the vocabulary.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding, gelu

import titanlite

VOCAB, DIM, HEADS, LENGTH = 12, 8, 2, 8
PARTITIONED_INPUT = True


def all_gather(x, dim, group):
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def exchange(x, scatter, gather, group):
    sent = torch.stack(x.chunk(dist.get_world_size(group), scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gather)


class SeqAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        ctx.way = gather, scatter, group
        return exchange(x, scatter, gather, group)

    @staticmethod
    def backward(ctx, grad):
        return exchange(grad, *ctx.way), None, None, None


class ReduceFromParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ScatterToSequenceRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad, 1, ctx.group), None


class Embedding(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM))

    def forward(self, tokens):
        if self.group is None:
            return embedding(tokens, self.weight)
        start = dist.get_rank(self.group) * len(self.weight)
        foreign = (tokens < start) | (tokens >= start + len(self.weight))
        found = embedding((tokens - start).masked_fill(foreign, 0), self.weight)
        return ReduceFromParallelRegion.apply(
            found.masked_fill(foreign.unsqueeze(-1), 0.0), self.group
        )


class Block(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def attention(self, x):
        qkv = x.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.group is not None:
            qkv = SeqAllToAll.apply(qkv, 2, 3, self.group)
        q, k, v = qkv
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        out = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        if self.group is not None:
            out = SeqAllToAll.apply(out, 2, 1, self.group)
        return out.transpose(1, 2).flatten(2)

    def forward(self, x):
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.positions = Embedding(), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        if self.group is not None:
            positions = positions + dist.get_rank(self.group) * tokens.shape[1]
        if self.group is None or PARTITIONED_INPUT:
            x = self.embed(tokens)
        else:
            x = ScatterToSequenceRegion.apply(
                self.embed(all_gather(tokens, 1, self.group)), self.group
            )
        x = x + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def shard(name):
    return (0, "sp") if name == "embed.weight" else None


def parallel(mesh):
    model, group = Model(), mesh.get_group("sp")
    own = model.embed.weight.detach().chunk(dist.get_world_size(group))[dist.get_rank(group)]
    model.embed.weight = nn.Parameter(own.clone())
    for module in (model, model.embed, *model.blocks):
        module.group = group
    return model


def step(model, batch):
    value = loss(model, batch) / dist.get_world_size()
    value.backward()
    for name, p in model.named_parameters():
        if shard(name) is None:
            dist.all_reduce(p.grad)
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


rng = torch.Generator().manual_seed(504)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, LENGTH + 1), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:]})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"sp": 2}, split={"sp": 1}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

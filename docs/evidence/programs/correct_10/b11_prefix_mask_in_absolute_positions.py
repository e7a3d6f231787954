"""A prefix language model with the sequence cut over the ranks: keys and values are gathered, the prefix is seen both ways.

Thread: of the kind bigscience-workshop/Megatron-DeepSpeed pull request #167 "Fix prefix lm offsets" (2021) and issue #303
"PrefixLM didn't work because we didn't pass attention_mask correctly" (2022).
Correct: the mask compares absolute positions of own queries and all keys. Ranks have different numbers of targets, since
the prefix has none, but each divides its sum by the targets of all ranks, times the number of ranks that DDP divides by.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, DIM, HEADS, LENGTH = 12, 8, 2, 8


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), 1)[dist.get_rank(ctx.group)], None


class PrefixAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2 * DIM, bias=False),
            nn.Linear(DIM, DIM),
        )

    def forward(self, x, prefix):
        q, kv, offset = self.q(x), self.kv(x), 0
        if self.group is not None:
            kv = GatherSequence.apply(kv, self.group)
            offset = x.shape[1] * dist.get_rank(self.group)
        queries = offset + torch.arange(x.shape[1])[:, None]
        keys = torch.arange(kv.shape[1])
        mask = (keys <= queries) | (keys < prefix[:, None, None])
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, *kv.chunk(2, -1)))
        y = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.out(y.transpose(1, 2).flatten(2))


class PrefixLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.attention = nn.ModuleList(PrefixAttention() for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM)) for _ in range(2)
        )
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions, prefix):
        x = self.wte(tokens) + self.wpe(positions)
        for attention, mlp in zip(self.attention, self.mlp):
            x = x + attention(x, prefix)
            x = x + gelu(mlp(x))
        return self.head(x)


def total(model, batch):
    logits = model(batch["tokens"], batch["positions"], batch["prefix"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def loss(model, batch):
    return total(model, batch) / (batch["labels"] != -100).sum()


def cut_sequence(batch, mesh):
    parts = {
        key: t.chunk(mesh.size(), 1)[mesh.get_rank()] for key, t in batch.items() if t.ndim > 1
    }
    return {**parts, "prefix": batch["prefix"]}


def parallel(mesh):
    model, group = PrefixLM(), mesh.get_group("cp")
    for attention in model.attention:
        attention.group = group
    return DistributedDataParallel(model, process_group=group)


def step(model, batch):
    targets = (batch["labels"] != -100).sum()
    dist.all_reduce(targets)
    value = dist.get_world_size() * total(model, batch) / targets
    value.backward()
    return value


rng = torch.Generator().manual_seed(322)


def draw():
    tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=rng)
    prefix = torch.randint(1, 7, (4,), generator=rng)
    positions = torch.arange(LENGTH).repeat(4, 1)
    labels = tokens[:, 1:].masked_fill(positions + 1 < prefix[:, None], -100)
    return {"tokens": tokens[:, :-1], "labels": labels, "positions": positions, "prefix": prefix}


batches = [draw() for _ in range(3)]
arguments = PrefixLM, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"cp": 2}, split=cut_sequence)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""GQA with a fused qkv matrix in Megatron's layout under tensor parallelism: the rank splits its rows in another order.

Thread: https://github.com/epfLLM/Megatron-LLM/pull/45 "Fix GQA handling in convert_wqkv" ("qkv_w contains per group
n_qs_per_kv * query + key + value"), 2023-08-20; many of the kind for checkpoint converters and LoRA on linear_qkv.
Wrong: the rows of qkv are [q q k v] of the first key-value group, then [q q k v] of the second. A rank has the two
groups that it should have, and cuts its output into all queries, all keys and all values, as if they lay in blocks.
With one group on a rank it would be right.
PLACE: blocks.*.attention, forward pass, the split of the output of qkv (qkv itself agrees)
KIND: local split of the fused qkv in block order (q, k, v) instead of by key-value group
REPAIR: `q, k, v = self.split_blocks(self.qkv(x))` -> `q, k, v = self.split_groups(self.qkv(x))`
EXPECT: in the forward pass, blocks.0.attention is the first whose output differs, on all ranks, while its qkv agrees:
the output of qkv is split wrongly into queries, keys and values on the rank (all queries, then keys, then values,
whereas the rows are grouped by key-value head). The input of proj is wrong, not its reduction.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import titanlite

VOCAB, DIM, GROUPS, REPEAT, SIZE = 13, 16, 4, 2, 4  # 8 query heads, 4 key-value heads


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


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.groups = GROUPS
        self.qkv = nn.Linear(DIM, GROUPS * (REPEAT + 2) * SIZE, bias=False)
        self.proj = nn.Linear(GROUPS * REPEAT * SIZE, DIM, bias=False)

    def split_groups(self, mixed):
        mixed = mixed.unflatten(-1, (self.groups, REPEAT + 2, SIZE))
        q, k, v = mixed.split([REPEAT, 1, 1], dim=-2)
        return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)

    def split_blocks(self, mixed):
        q, k, v = mixed.split(
            [n * SIZE for n in (self.groups * REPEAT, self.groups, self.groups)], -1
        )
        return (t.unflatten(-1, (-1, SIZE)) for t in (q, k, v))

    def attend(self, q, k, v):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = k.repeat_interleave(REPEAT, 1), v.repeat_interleave(REPEAT, 1)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(*self.split_groups(self.qkv(x)))


class ParallelAttention(Attention):
    def __init__(self, whole, group):
        super().__init__()
        n, i, self.group = dist.get_world_size(group), dist.get_rank(group), group
        self.groups = GROUPS // n
        self.qkv.weight = nn.Parameter(whole.qkv.weight.detach().chunk(n, 0)[i].clone())
        self.proj.weight = nn.Parameter(whole.proj.weight.detach().chunk(n, 1)[i].clone())

    def forward(self, x):
        x = Copy.apply(x, self.group)
        q, k, v = self.split_blocks(self.qkv(x))
        return Sum.apply(self.attend(q, k, v), self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(DIM), Attention()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def parallel(mesh):
    model, group = Model(), mesh.get_group("tp")
    for block in model.blocks:
        block.attention = ParallelAttention(block.attention, group)
    return model


def shard(name):
    if name.endswith("qkv.weight"):
        return 0, "tp"
    return (1, "tp") if name.endswith("proj.weight") else None


generator = torch.Generator().manual_seed(4)


def draw():
    return torch.randint(VOCAB, (4, 6), generator=generator)


batches = [{"tokens": draw(), "targets": draw()} for _ in range(3)]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"tp": 2}, shard=shard)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

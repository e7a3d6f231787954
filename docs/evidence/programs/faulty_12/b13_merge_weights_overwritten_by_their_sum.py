"""Attention to a long context whose tokens are cut over the ranks: all-reduces merge the partial results, as in tree attention.

Thread: of the kind NVIDIA/Megatron-LM pull request #97 "add mark_dirty for in-place operation" (2021),
"torch.distributed.all_reduce operates in-place for its inputs", and linkedin/Liger-Kernel issue #254 "Are you even allowed to
do these ops inplace?" (2024), where an operation changes a tensor that another one "saves ... for backprop".
Fault: Reduce.forward all-reduces its input in place (contiguous() copies nothing). For the denominator that is `weight`, which
exp and the product with the values have saved for backward; autograd does not notice, since collectives do not change the
version counter.
REPAIR: `total = x.contiguous()` -> `total = x.contiguous().clone()`
A right first sentence says: losses agree at step 1, but in backward the gradients at the attention of the last block (of q, k,
v and of all that lies before) are wrong on all ranks: the all-reduce of the denominator overwrites in place the merge weights
that autograd has saved, so backward uses their sum over cp; reduce a copy.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, HEADS, LENGTH, CONTEXT = 12, 8, 2, 5, 9


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        total = x.contiguous()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ContextAttention(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.proj = nn.Linear(DIM, DIM)

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x, context):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(context)), self.heads(self.v(context))
        if self.group is not None:
            q = Copy.apply(q, self.group)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        out = scores.softmax(-1) @ v
        if self.group is not None:
            out = self.merge(out, scores.logsumexp(-1, keepdim=True))
        return self.proj(out.transpose(1, 2).flatten(2))

    def merge(self, out, lse):
        largest = lse.detach().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        weight = torch.exp(lse - largest)
        numerator = Reduce.apply(weight * out, self.group)
        denominator = Reduce.apply(weight, self.group)
        return numerator / denominator


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = ContextAttention()
        self.up, self.down = nn.Linear(DIM, 16), nn.Linear(16, DIM)

    def forward(self, x, context):
        x = x + self.attention(self.norm1(x), context)
        return x + self.down(gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 12), nn.Linear(12, DIM)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.embed = Encoder(), nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, context):
        x, context = self.embed(tokens), self.encoder(context)
        for block in self.blocks:
            x = block(x, context)
        return self.head(x)


def loss(model, batch):
    logits = model(batch["tokens"], batch["context"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallel(mesh):
    model = Model()
    for block in model.blocks:
        block.attention.group = mesh.get_group("cp")
    return model


def split(batch, mesh):  # the context is cut, all ranks have all questions
    own = batch["context"].chunk(mesh["cp"].size(), 1)[mesh.get_local_rank("cp")]
    return {**batch, "context": own}


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for name, p in model.named_parameters():
        if (
            "encoder." in name or ".k." in name or ".v." in name
        ):  # these have seen the rank's own context
            dist.all_reduce(p.grad)
    return value.detach()


rng = torch.Generator().manual_seed(505)
batches = []
for _ in range(3):
    rows = torch.randint(VOCAB, (4, LENGTH + 1), generator=rng)
    context = torch.randint(VOCAB, (4, CONTEXT), generator=rng)
    batches.append({"tokens": rows[:, :-1], "labels": rows[:, 1:], "context": context})
arguments = Model, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"cp": 3}, split=split)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

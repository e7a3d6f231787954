"""A vocabulary of 13 words cut into 7 and 6, embedding and head tied, the loss over vocabulary shards.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1754 "[BUG]" (vocabulary sizes that tp does not divide),
2025-08-19.
Right: each rank knows the first row of its shard; the ignored labels have no loss; the tied weight has the
gradients of both uses of its rows.
Must not be accused: uneven shards, a tied weight, columns of logits that differ in number, a custom backward pass.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding, linear

import titanlite

VOCAB, DIM, IGNORE = 13, 10, -100


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, forward):
        ctx.args, x = (group, forward), x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        group, forward = ctx.args
        return (grad if forward else Reduce.apply(grad, group, True)), None, None


class ShardedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, first, group):
        local = labels - first
        mine = (local >= 0) & (local < logits.shape[-1])
        local, valid = local.clamp(0, logits.shape[-1] - 1), labels != IGNORE
        maximum = logits.amax(-1)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        exp = (logits - maximum[:, None]).exp()
        sums = torch.stack([exp.sum(-1), (logits.gather(-1, local[:, None])[:, 0]) * mine])
        dist.all_reduce(sums, group=group)
        losses = (sums[0].log() + maximum - sums[1]) * valid
        probabilities = exp / sums[0][:, None]
        probabilities[torch.arange(len(local)), local] -= mine.to(exp.dtype)
        ctx.save_for_backward(probabilities * valid[:, None] / valid.sum())
        return losses.sum() / valid.sum()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None, None, None


class Tied(nn.Module):
    group, first = None, 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM) * 0.4)
        self.mlp, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, tokens):
        if self.group is None:
            x = embedding(tokens, self.weight)
        else:
            local = tokens - self.first
            outside = (local < 0) | (local >= len(self.weight))
            x = embedding(local.masked_fill(outside, 0), self.weight)
            x = Reduce.apply(x.masked_fill(outside[..., None], 0.0), self.group, True)
        x = self.norm(x + torch.tanh(self.mlp(x)))
        if self.group is not None:
            x = Reduce.apply(x, self.group, False)
        return linear(x, self.weight)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel_loss(model, batch):
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    return ShardedLoss.apply(logits, labels, model.first, model.group)


def parallel(mesh):
    model, group = Tied(), mesh.get_group("tp")
    shards = model.weight.data.chunk(group.size())
    model.group, model.first = group, sum(map(len, shards[: group.rank()]))
    model.weight = nn.Parameter(shards[group.rank()].clone())
    return model


def draw(generator):
    batch = {n: torch.randint(VOCAB, (2, 7), generator=generator) for n in ("tokens", "labels")}
    batch["labels"][torch.rand(2, 7, generator=generator) < 0.3] = IGNORE
    return batch


def own_rows(weight):
    return weight.chunk(dist.get_world_size())[dist.get_rank()]


def shard(name):
    return own_rows if name == "weight" else None


generator = torch.Generator().manual_seed(13)
batches = [draw(generator) for _ in range(3)]
arguments = Tied, parallel
options = dict(
    batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"tp": 2}, shard=shard
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

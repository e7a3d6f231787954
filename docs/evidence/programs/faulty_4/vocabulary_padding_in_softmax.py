"""A vocabulary of 13 words is padded to 14 for tensor parallelism; the padded logit takes part in the softmax.

Thread: https://github.com/NVIDIA/Megatron-LM/issues/1754 "[BUG]" (divergent loss for vocabulary sizes that the
tensor parallel size does not divide), 2025-08-19.
Wrong: the last rank has one row more, of zeros. Its logit is 0 and adds exp(0) to the denominator.
EXPECT: the loss is the first that differs (all outputs agree but for the padded column): in the loss of the
vocabulary shards, the sum of exponentials includes the column of the padding, on the last rank of tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM = 13, 12


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class GPT(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.mlp, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.output_layer = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.norm(x + torch.tanh(self.mlp(x)))
        if self.group is not None:
            x = Copy.apply(x, self.group)
        return self.output_layer(x)


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def vocab_parallel_loss(model, batch):
    logits, labels, group = (
        model(batch["tokens"]).flatten(0, 1),
        batch["labels"].flatten(),
        model.group,
    )
    size = logits.shape[-1]
    labels = labels - group.rank() * size
    outside = (labels < 0) | (labels >= size)
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    logits = logits - largest[:, None]
    predicted = logits.gather(-1, labels.masked_fill(outside, 0)[:, None])[:, 0]
    predicted = Sum.apply(predicted.masked_fill(outside, 0.0), group)
    sum_exp = Sum.apply(logits.exp().sum(-1), group)
    return (sum_exp.log() - predicted).mean()


def padded_rows(weight):
    size = dist.get_world_size()
    padding = weight.new_zeros(-len(weight) % size, DIM)
    return torch.cat([weight, padding]).chunk(size)[dist.get_rank()]


def shard(name):
    return padded_rows if name == "output_layer.weight" else None


def parallel(mesh):
    model = GPT()
    model.group = mesh.get_group("tp")
    model.output_layer.weight = nn.Parameter(padded_rows(model.output_layer.weight.detach()))
    return model


generator = torch.Generator().manual_seed(1754)
batches = [
    {n: torch.randint(VOCAB, (2, 6), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = GPT, parallel
options = dict(batches=batches, loss=loss, parallel_loss=vocab_parallel_loss, shard=shard)
options["ranks"] = {"tp": 2}

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

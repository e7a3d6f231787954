"""A vocabulary of 19 on two ranks: the output layer is padded to 20 rows, whose logit is masked.

Thread: https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/255 "[WIP] set the tokenizer vocab size"
(--make-vocab-size-divisible-by, padded_vocab_size), 2022-02-28.
Right: the padded row is zero, its logit is -inf in the loss, so it has no gradient and stays zero.
Must not be accused: shards of different content than an even cut, a row that the plain model lacks, logits
of -inf, the maximum and the sum of the softmax over tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, pad, silu

import titanlite

DIM, VOCAB, TP = 16, 19, 2
PER_RANK = (VOCAB + TP - 1) // TP


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class LanguageModel(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 32), nn.Linear(32, DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.down(silu(self.up(x))))
        return self.output(x if self.group is None else CopyToRanks.apply(x, self.group))


def own_rows(weight):
    padded = pad(weight, (0, 0, 0, PER_RANK * TP - VOCAB))
    return padded.chunk(TP)[dist.get_rank()].clone()


def shard(name):
    return own_rows if name == "output.weight" else None


def parallel(mesh):
    model = LanguageModel()
    model.group = mesh.get_group("tp")
    model.output.weight.data = own_rows(model.output.weight.data)
    return model


def loss(model, batch):
    return cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def vocab_parallel_loss(model, batch):
    logits, group = model(batch["ids"]), model.group
    first = group.rank() * PER_RANK
    padding = torch.arange(first, first + PER_RANK) >= VOCAB
    logits = logits.masked_fill(padding, float("-inf"))
    peak = logits.detach().max(-1, keepdim=True).values
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    total = SumOverRanks.apply((logits - peak).exp().sum(-1), group)
    local = batch["labels"] - first
    mine = (local >= 0) & (local < PER_RANK)
    picked = (logits - peak).gather(-1, (local * mine).unsqueeze(-1)).squeeze(-1)
    target = SumOverRanks.apply(picked.where(mine, torch.zeros_like(picked)), group)
    return (total.log() - target).mean()


generator = torch.Generator().manual_seed(255)
batches = [
    {name: torch.randint(VOCAB, (3, 6), generator=generator) for name in ("ids", "labels")}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, parallel_loss=vocab_parallel_loss, shard=shard)
    print(titanlite.compare(LanguageModel, parallel, ranks={"tp": 2}, **options))

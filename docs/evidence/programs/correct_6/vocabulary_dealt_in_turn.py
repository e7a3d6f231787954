"""A vocabulary dealt to the tp ranks in turn, since the frequent tokens have the low numbers: token t lives on t % 3.

Thread: https://github.com/hpcaitech/CachedEmbedding/pull/64 "Add word-frequency load balance manager impl. and hybrid
parallel ...", 2022-07-22.
Right: embedding, head and loss agree on it: row t // 3 of rank t % 3. 14 words make shards of 5, 5 and 4 rows.
Must not be accused: shards that are no blocks of rows, of uneven size; logits whose columns are every third one; that
the maximum is all-reduced without a gradient.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, embedding

import titanlite

VOCAB, DIM, SEQ = 14, 12, 6


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


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


class DealtEmbedding(nn.Module):
    group = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM) * 0.5)

    def forward(self, tokens):
        if self.group is None:
            return embedding(tokens, self.weight)
        size, rank = self.group.size(), self.group.rank()
        mine = (tokens % size == rank).unsqueeze(-1)
        rows = embedding((tokens // size).clamp(max=len(self.weight) - 1), self.weight)
        return Leave.apply(torch.where(mine, rows, 0.0), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = DealtEmbedding(), nn.LayerNorm(DIM)
        self.rnn, self.head = nn.GRU(DIM, DIM, batch_first=True), nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + self.rnn(x)[0])
        return self.head(x if self.embed.group is None else Enter.apply(x, self.embed.group))


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def parallel_loss(model, batch):
    group = model.embed.group
    logits, labels = model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten()
    top = logits.detach().amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits = logits - top.unsqueeze(-1)
    total = Leave.apply(logits.exp().sum(-1), group)
    column = (labels // group.size()).clamp(max=logits.shape[1] - 1).unsqueeze(-1)
    own = torch.where(labels % group.size() == group.rank(), logits.gather(-1, column)[:, 0], 0.0)
    return (total.log() - Leave.apply(own, group)).mean()


def own_rows(tensor):
    return tensor[dist.get_rank() :: dist.get_world_size()]


def shard(name):
    return own_rows if name.startswith(("embed.", "head.")) else None


def parallel(mesh):
    model = Model()
    model.embed.group = mesh.get_group("tp")
    for name, p in model.named_parameters():
        if shard(name) is not None:
            p.data = own_rows(p.data).clone()
    return model


generator = torch.Generator().manual_seed(64)
batches = [
    {n: torch.randint(VOCAB, (3, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(
    batches=batches, loss=loss, parallel_loss=parallel_loss, ranks={"tp": 3}, shard=shard
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

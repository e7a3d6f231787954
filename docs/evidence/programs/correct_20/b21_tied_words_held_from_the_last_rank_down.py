"""A language model with tied word embeddings cut over the vocabulary by hand; the last rank holds the first words.

Might be accused because: the ranks hold the vocabulary's parts in reverse order, most ranks find no target among their words and
take zero as the target's logit, and the embedding's output and the head's input each have a reduction of their own.
Correct because: each rank masks what isn't among its own words, the parts are summed before they're used, and the gradient of the
head's input is summed over the ranks; the order of the parts matters to nobody.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, LENGTH, HIDDEN, LAYERS = 24, 12, 9, 24, 2


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Words(nn.Module):
    """The word embedding, used for the input and for the output."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(VOCAB, WIDTH))

    def embed(self, tokens):
        return F.embedding(tokens, self.weight)

    def loss(self, x, labels):
        return F.cross_entropy((x @ self.weight.T).flatten(0, 1), labels.flatten())


class SharedWords(nn.Module):
    def __init__(self, whole, group):
        super().__init__()
        self.group, part = group, part_of_rank(group)
        self.weight = nn.Parameter(whole.weight.detach().chunk(part[1])[part[0]].clone())
        self.first = part[0] * len(self.weight)

    def own(self, ids):
        ids = ids - self.first
        mine = (ids >= 0) & (ids < len(self.weight))
        return ids.masked_fill(~mine, 0), mine

    def embed(self, tokens):
        ids, mine = self.own(tokens)
        return SumForward.apply(F.embedding(ids, self.weight) * mine.unsqueeze(-1), self.group)

    def loss(self, x, labels):
        logits = SumBackward.apply(x, self.group) @ self.weight.T
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        logits = logits - largest.unsqueeze(-1)
        ids, mine = self.own(labels)
        target = logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * mine
        normalizer = SumForward.apply(logits.exp().sum(-1), self.group).log()
        return (normalizer - SumForward.apply(target, self.group)).mean()


def part_of_rank(group=None):
    world = dist.get_world_size(group)
    return world - 1 - dist.get_rank(group), world


class RecurrentLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = Words()
        self.rnn = nn.GRU(WIDTH, HIDDEN, LAYERS, batch_first=True)
        self.project, self.norm = nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, tokens, labels):
        x, _ = self.rnn(self.words.embed(tokens))
        return self.words.loss(self.norm(self.project(x)), labels)


def plain():
    return RecurrentLM()


def parallel(mesh):
    model = RecurrentLM()
    model.words = SharedWords(model.words, mesh.get_group("tp"))
    return model


def shard(name):
    return (0, *part_of_rank()) if name == "words.weight" else None


def loss(model, batch):
    return model(batch[:, :-1], batch[:, 1:])


generator = torch.Generator().manual_seed(2112)
batches = [torch.randint(0, VOCAB, (4, LENGTH + 1), generator=generator) for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    shard=shard,
    ranks={"tp": 3},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

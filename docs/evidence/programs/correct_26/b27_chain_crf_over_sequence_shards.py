"""A tagger of reads with a linear-chain CRF whose partition function is put together from the products of four shards.

Thread: harvardnlp/pytorch-struct issue #85 "up sweep and down sweep" (2020), on the parallel scan of a linear-chain
CRF, whose down sweep is left to autograd.
What could be accused: the gather's backward function returns the rank's own slice without a sum, the reported loss and
the one that goes backward differ by the other ranks' scores, the first position is known to one rank alone, and shards
that are all padding hand in a matrix of zeros and large negative numbers; but every rank has the whole gradient of the
combined product, nothing that is combined after the gather has parameters, and that matrix is the log semiring's one.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import titanlite

LETTERS, TAGS, WIDTH, LENGTH, ROWS = 6, 4, 10, 16, 5
MINUS_INFINITY = -1e5


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.rank = dist.get_rank(group)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.rank], None


def multiply(a, b):
    """The matrix product in the log semiring."""
    return (a.unsqueeze(-1) + b.unsqueeze(-3)).logsumexp(-2)


class Crf(nn.Module):
    def __init__(self):
        super().__init__()
        self.transitions = nn.Parameter(0.3 * torch.randn(TAGS, TAGS))
        self.start, self.end = (nn.Parameter(0.3 * torch.randn(TAGS)) for _ in range(2))

    def product(self, emissions, inside, first):
        """Of the matrices of a shard; padding leaves it as it is."""
        one = torch.full((TAGS, TAGS), MINUS_INFINITY, dtype=emissions.dtype).fill_diagonal_(0.0)
        result = one.expand(len(emissions), -1, -1)
        for t in range(emissions.shape[1]):
            into = self.start if first and t == 0 else self.transitions
            step = into + emissions[:, t].unsqueeze(1)
            result = torch.where(inside[:, t, None, None], multiply(result, step), result)
        return result

    def score(self, emissions, tags, before, inside, last, first):
        """Of the tags of a shard; the sequence ends where last is set."""
        own = emissions.gather(2, tags.unsqueeze(2)).squeeze(2)
        previous = torch.cat([before, tags[:, :-1]], 1)
        into = self.transitions[previous, tags]
        if first:
            into = torch.cat([self.start[tags[:, :1]], into[:, 1:]], 1)
        return ((own + into) * inside + self.end[tags] * last).sum(1)


class ReadTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.hidden, self.emit = nn.Linear(WIDTH + 1, 2 * WIDTH), nn.Linear(2 * WIDTH, TAGS)
        self.crf = Crf()

    def forward(self, letters, quality):
        x = torch.cat([self.letters(letters), quality.unsqueeze(2)], 2)
        return self.emit(torch.tanh(self.hidden(x)))


def end_marks(emissions, last, crf):
    """The scores of the end belong to the emissions of the last position."""
    return emissions + last.unsqueeze(2) * crf.end


def plain():
    return ReadTagger()


def parallel(mesh):
    return ReadTagger(), mesh.get_group("sequence")


def loss(model, batch):
    tags, inside, last = batch["tags"], batch["inside"], batch["last"]
    emissions = model(batch["letters"], batch["quality"])
    product = model.crf.product(end_marks(emissions, last, model.crf), inside, True)
    score = model.crf.score(emissions, tags, tags[:, :1], inside, last, True)
    return (product[:, 0].logsumexp(-1) - score).mean()


def step(built, batch):
    model, group = built
    rank, tags, inside, last = dist.get_rank(group), batch["tags"], batch["inside"], batch["last"]
    emissions = model(batch["letters"], batch["quality"])
    product = model.crf.product(end_marks(emissions, last, model.crf), inside, rank == 0)
    chain, *others = Gather.apply(product, group)
    for other in others:
        chain = multiply(chain, other)
    before = Gather.apply(tags[:, -1:], group)[rank - 1]
    score = model.crf.score(emissions, tags, before, inside, last, rank == 0)
    partition = chain[:, 0].logsumexp(-1)
    (partition - score).mean().backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
    score = score.detach()
    dist.all_reduce(score, group=group)
    return (partition.detach() - score).mean()


generator = torch.Generator().manual_seed(85)


def reads():
    lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    places = torch.arange(LENGTH)
    return {
        "letters": torch.randint(0, LETTERS, (ROWS, LENGTH), generator=generator),
        "quality": torch.rand(ROWS, LENGTH, generator=generator),
        "tags": torch.randint(0, TAGS, (ROWS, LENGTH), generator=generator),
        "inside": places < lengths,
        "last": places == lengths - 1,
    }


batches = [reads() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split={"sequence": 1},
    ranks={"sequence": 4},
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A keystroke tagger whose ranks have unequal numbers of microbatches; an own Joinable shadows the reductions.

Thread: pytorch/pytorch pull request #60757 "Refactor DDP join() API, adding hooks" (2021): a class of one's own can
take part in the Join context by notifying it before each collective and by a hook that shadows the collective.
Correct: the gradients of every microbatch are reduced at once, as a flat sum that ends in the sums of losses and of
tags. A rank that has run out of microbatches reduces zeros, but unlike a joined DDP it adds the others' sums to its own
totals. When all have joined, the post hook divides by the number of tags and the totals become the gradients (as views
of the flat buffer), equal on all ranks. In between, param.grad only holds one microbatch.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

import titanlite

KEYS, TAGS, WIDTH, LENGTH, SMALL = 30, 6, 16, 7, 2
SHARES = (8, 2, 4)


class KeystrokeTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.delay = nn.Embedding(KEYS, WIDTH), nn.Linear(1, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(WIDTH, TAGS)

    def forward(self, keys, delays):
        x = self.keys(keys) + torch.sin(self.delay(delays.unsqueeze(-1)))
        return self.out(x + self.recurrent(x)[0])


def tag_losses(model, batch):
    """The sum of the losses and the number of tags."""
    keys, delays, tags = batch
    logits = model(keys, delays).flatten(0, 1)
    losses = F.cross_entropy(logits, tags.flatten(), ignore_index=-1, reduction="sum")
    return losses, (tags >= 0).sum()


class ReducerHook(JoinHook):
    def __init__(self, reducer):
        self.reducer = reducer

    def main_hook(self):
        self.reducer.reduce(torch.zeros_like(self.reducer.totals))

    def post_hook(self, is_last_joiner):
        self.reducer.finish()


class SumReducer(Joinable):
    def __init__(self, model, group):
        super().__init__()
        self.parameters, self.group = list(model.parameters()), group
        self.sizes = [p.numel() for p in self.parameters]

    def join_hook(self, **kwargs):
        self.totals = torch.zeros(sum(self.sizes) + 2)
        return ReducerHook(self)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return self.group

    def reduce(self, flat):
        dist.all_reduce(flat, group=self.group)
        self.totals += flat

    def __call__(self, losses, count):
        Join.notify_join_context(self)
        losses.backward()
        pieces = [p.grad.flatten() for p in self.parameters]
        self.reduce(torch.cat([*pieces, torch.stack([losses.detach(), count.to(losses.dtype)])]))
        for p in self.parameters:
            p.grad = None

    def finish(self):
        flat, self.value = self.totals[:-2], self.totals[-2] / self.totals[-1]
        flat /= self.totals[-1]
        for p, piece in zip(self.parameters, flat.split(self.sizes)):
            p.grad = piece.view_as(p)


def plain():
    return KeystrokeTagger()


def parallel(mesh):
    model = KeystrokeTagger()
    return model, SumReducer(model, mesh.get_group("dp"))


def loss(model, batch):
    losses, count = tag_losses(model, batch)
    return losses / count


def split(batch, mesh):
    return tuple(t.split(SHARES)[mesh.get_local_rank("dp")] for t in batch)


def step(built, batch):
    model, reducer = built
    with Join([reducer]):
        for part in zip(*(t.split(SMALL) for t in batch)):
            reducer(*tag_losses(model, part))
    return reducer.value


generator = torch.Generator().manual_seed(60757)


def sessions():
    shape = (sum(SHARES), LENGTH)
    keys = torch.randint(0, KEYS, shape, generator=generator)
    delays = torch.rand(shape, generator=generator, dtype=torch.float64) * 3
    tags = torch.randint(-1, TAGS, shape, generator=generator)
    return keys, delays, tags


batches = [sessions() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=split,
    ranks={"dp": len(SHARES)},
    clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.3),
    optimizer=lambda parameters: torch.optim.Adamax(parameters, lr=4e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

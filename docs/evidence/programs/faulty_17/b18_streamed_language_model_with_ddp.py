"""A GRU language model on a stream of token rows under DDP, with gradient accumulation over micro-batches of a DataLoader.

Thread: huggingface/datasets issue #5360 "IterableDataset returns duplicated data using PyTorch DDP" (2022-2023); also
huggingface/transformers pull request #11254 (2021): with an iterable dataset "the training will be on the same data on
all processes".
Fault: in DistributedTrainer.train_step the TokenRows dataset is built without rank and number of processes, so every rank reads
the first rows of the stream; the rest of the rows is never trained on.
REPAIR: `rows = TokenRows(stream)` -> `rows = TokenRows(stream, dist.get_rank(), dist.get_world_size())`
A right first sentence says: all DDP ranks read the same rows of the stream because the iterable dataset isn't sharded by rank, so
the step trains on a third of the rows three times over instead of the whole batch.
"""

import contextlib
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

import titanlite

VOCAB, EMBED, HIDDEN, LENGTH = 20, 10, 14, 9
MICRO_BATCH, ACCUMULATION = 2, 2


class TokenRows(IterableDataset):
    """Rows of tokens from a stream that all processes can read; a process takes every `world`-th row."""

    def __init__(self, stream, rank=0, world=1):
        self.stream, self.rank, self.world = stream, rank, world

    def __iter__(self):
        for row in islice(self.stream, self.rank, None, self.world):
            yield row[:-1], row[1:]


class GRULanguageModel(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, EMBED)
        self.rnn = nn.GRU(EMBED, HIDDEN, layers, batch_first=True)
        self.project = nn.Linear(HIDDEN, EMBED)
        self.decoder = nn.Linear(EMBED, VOCAB)
        self.decoder.weight = self.encoder.weight

    def forward(self, inputs):
        states, _ = self.rnn(self.encoder(inputs))
        return self.decoder(torch.tanh(self.project(states)))


def nll(model, inputs, targets):
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class MeanMeter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value):
        self.total, self.count = self.total + value.detach(), self.count + 1

    def average_over_processes(self):
        mean = self.total / self.count
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


class DistributedTrainer:
    def __init__(self, model, micro_batch=MICRO_BATCH, accumulation=ACCUMULATION):
        self.model = DDP(model)
        self.micro_batch, self.accumulation = micro_batch, accumulation

    def synced(self, last):
        return contextlib.nullcontext() if last else self.model.no_sync()

    def train_step(self, stream):
        rows = TokenRows(stream)
        loader = DataLoader(rows, batch_size=self.micro_batch)
        meter = MeanMeter()
        for number, (inputs, targets) in enumerate(islice(loader, self.accumulation), start=1):
            with self.synced(number == self.accumulation):
                value = nll(self.model, inputs, targets)
                (value / self.accumulation).backward()
            meter.update(value)
        return meter.average_over_processes()


def plain():
    return GRULanguageModel()


def parallel(mesh):
    trainer = DistributedTrainer(GRULanguageModel())
    return trainer.model, trainer


def loss(model, stream):
    inputs, targets = next(iter(DataLoader(TokenRows(stream), batch_size=len(stream))))
    return nll(model, inputs, targets)


def step(built, stream):
    return built[1].train_step(stream)


def whole_stream(stream, mesh):
    return stream


RANKS = 3
generator = torch.Generator().manual_seed(5360)


def stream_of_rows():
    rows = RANKS * MICRO_BATCH * ACCUMULATION
    starts = torch.randint(0, VOCAB, (rows, 1), generator=generator)
    strides = torch.randint(1, 5, (rows, 1), generator=generator)
    noise = torch.randint(0, 3, (rows, LENGTH + 1), generator=generator)
    return (starts + strides * torch.arange(LENGTH + 1) + noise) % VOCAB


batches = [stream_of_rows() for _ in range(4)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=whole_stream,
    ranks={"dp": RANKS},
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""A recurrent language model under DDP whose ranks make different numbers of micro-batches of about equally many tokens.

Might be accused because: the rows are dealt out by length and not in equal chunks; the ranks run different numbers of backward
passes and have different numbers of tokens; the losses are sums; DDP's hook sums and doesn't average; the gradients are divided
by a count only after the last backward pass; the padding is cut off, so that shapes differ between the ranks.
Correct because: the sum over all ranks and micro-batches is the sum over all tokens of the batch, each counted once, and this
sum is divided by the tokens of all ranks. The hook runs in each rank's last micro-batch only, when DDP reduces what has been
accumulated. The network is causal, so the padding on the right has no influence on the tokens before it.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, LENGTH, ROWS, BUDGET, PADDING = 25, 12, 11, 12, 20, 0


class RecurrentLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=PADDING)
        self.rnn = nn.GRU(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True)
        self.project, self.head = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(torch.tanh(self.project(self.rnn(self.embed(tokens))[0])))


def lengths_of(rows):
    return (rows[:, 1:] != PADDING).sum(1)


def summed_loss(model, rows):
    logits, labels = model(rows[:, :-1]), rows[:, 1:]
    return F.cross_entropy(logits.mT, labels, ignore_index=PADDING, reduction="sum")


def micro_batches(rows):
    """As many rows as the budget of tokens allows, at least one, without the common padding."""
    start, lengths = 0, lengths_of(rows)
    while start < len(rows):
        end = start + 1
        while end < len(rows) and lengths[start : end + 1].max() * (end + 1 - start) <= BUDGET:
            end += 1
        yield rows[start:end, : lengths[start:end].max() + 1]
        start = end


def sum_hook(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def plain():
    return RecurrentLM()


def parallel(mesh):
    model = DistributedDataParallel(RecurrentLM(), process_group=mesh.get_group("dp"))
    model.register_comm_hook(None, sum_hook)
    return model


def loss(model, batch):
    return summed_loss(model, batch) / lengths_of(batch).sum()


def step(model, rows):
    totals = torch.zeros(2)
    pieces = list(micro_batches(rows))
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            value = summed_loss(model, piece)
            value.backward()
        totals += torch.stack([value.detach(), lengths_of(piece).sum()])
    dist.all_reduce(totals)
    for parameter in model.parameters():
        parameter.grad /= totals[1]
    return totals[0] / totals[1]


def dealt_by_length(batch, mesh):
    """The long rows on the last rank, more of the short ones on the first."""
    batch = batch[lengths_of(batch).argsort()]
    first = ROWS // 2 + 1
    return batch[:first] if mesh.get_local_rank("dp") == 0 else batch[first:]


generator = torch.Generator().manual_seed(25)


def sentences():
    text = torch.randint(1, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    ends = torch.randint(3, LENGTH + 2, (ROWS, 1), generator=generator)
    return text.masked_fill(torch.arange(LENGTH + 1) >= ends, PADDING)


batches = [sentences() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split=dealt_by_length,
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""DDP whose ranks have batches of different sizes, with weighted losses.

Thread: https://github.com/pytorch/pytorch/issues/67253 "Support different batch size across GPUs with
DDP", 2021-10-26.
Right: each rank's loss is its sum times the world size over the global number of samples.
Must not be accused: ranks' losses that are no means, unequal parts of the batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import titanlite


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 12, batch_first=True)
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def plain_loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def by_speed(batch, mesh):
    """The fast GPU gets 5 samples, the slow one 2."""
    return {name: value.split([5, 2])[dist.get_rank()] for name, value in batch.items()}


def step(model, batch):
    sum_loss = cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    count = torch.tensor(len(batch["x"]))
    dist.all_reduce(count)
    loss = sum_loss * dist.get_world_size() / count
    loss.backward()
    return loss


def build():
    return DDP(Recognizer())


generator = torch.Generator().manual_seed(14)
batches = [
    {
        "x": torch.randn(7, 4, 6, generator=generator),
        "y": torch.randint(5, (7,), generator=generator),
    }
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=plain_loss, ranks={"dp": 2}, split=by_speed, step=step)
    print(titanlite.compare(Recognizer, build, **options))

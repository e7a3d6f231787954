"""DDP whose loss is all-reduced by torch.distributed.nn, with autograd, before the backward pass.

Thread: of the kind huggingface/transformers issue #34242 "Add DDP token averaging for equivalent non-parallel training similar
to #34191" (2024), and texttron/tevatron issue #30 "Why to scale the loss when DDP trainning" (2022).
Correct: each rank's loss is the mean over all ranks' tokens. The backward pass of that all-reduce sums the ranks' gradients
of the loss, one each, so every rank's own tokens count as often as there are ranks, and DDP's average makes it once.
"""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nnf
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, CHANNELS = 12, 8


class GatedConv(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.past = 2 * dilation
        self.conv = nn.Conv1d(CHANNELS, 2 * CHANNELS, 3, dilation=dilation)
        self.out = nn.Conv1d(CHANNELS, CHANNELS, 1)

    def forward(self, x):
        a, b = self.conv(pad(x, (self.past, 0))).chunk(2, 1)
        return x + self.out(torch.tanh(a) * b.sigmoid())


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, CHANNELS)
        self.stack = nn.Sequential(GatedConv(1), GatedConv(2))
        self.head = nn.Conv1d(CHANNELS, VOCAB, 1)

    def forward(self, codes):
        return self.head(self.stack(self.embed(codes).transpose(1, 2)))


def loss(model, batch):
    return cross_entropy(model(batch["codes"]), batch["labels"])


def parallel(mesh):
    return DistributedDataParallel(WaveNet(), process_group=mesh.get_group("dp"))


def global_mean(model, batch):
    total = cross_entropy(model(batch["codes"]), batch["labels"], reduction="sum")
    count = (batch["labels"] != -100).sum()
    dist.all_reduce(count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nnf.all_reduce(total) / count


rng = torch.Generator().manual_seed(323)


def draw():
    codes = torch.randint(VOCAB, (6, 9), generator=rng)
    silent = torch.arange(8) >= torch.randint(2, 9, (6, 1), generator=rng)
    return {"codes": codes[:, :-1], "labels": codes[:, 1:].masked_fill(silent, -100)}


batches = [draw() for _ in range(3)]
arguments = WaveNet, parallel
options = dict(batches=batches, loss=loss, parallel_loss=global_mean, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

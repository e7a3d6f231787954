"""A masked language model under DDP whose trainer sums its loss over tokens and scales the gradients after the backward passes.

Thread: facebookresearch/fairseq issue #494 "Undoing of normalization by world size?" (2019), on multiplying the gradients by the
number of ranks over the sample size.
Correct because: each rank backpropagates the plain sum over its masked tokens, in two micro-batches of which only the last
synchronizes; DDP divides the total by the number of ranks. Then all gradients are multiplied by the number of ranks over the number
of masked tokens in both micro-batches of all ranks, which leaves the sum over all tokens divided by their number. It makes no
difference that the ranks and micro-batches have different numbers of masked tokens.
"""

import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import titanlite

VOCAB, WIDTH, LENGTH, MASK, PAD = 29, 12, 9, 0, -1


class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class MaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(2))
        self.dense, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        x = self.norm(F.gelu(self.dense(x)))
        return F.linear(x, self.tokens.weight, self.bias)


class MaskedLMCriterion:
    def __call__(self, model, sample):
        """The loss summed over the masked tokens, and their number."""
        logits = model(sample["tokens"])
        targets = sample["targets"]
        value = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
        )
        return value, (targets != PAD).sum()


criterion = MaskedLMCriterion()


class Trainer:
    def __init__(self, model, update_freq=2):
        self.model, self.update_freq = model, update_freq

    def maybe_no_sync(self, index):
        if index < self.update_freq - 1:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def multiply_grads(self, factor):
        for parameter in self.model.parameters():
            parameter.grad.mul_(factor)

    def train_step(self, batch):
        samples = [
            dict(zip(batch, values))
            for values in zip(*(value.chunk(self.update_freq) for value in batch.values()))
        ]
        logged = 0
        for index, sample in enumerate(samples):
            with self.maybe_no_sync(index):
                value, sample_size = criterion(self.model, sample)
                value.backward()
            logged = logged + torch.stack([value.detach(), sample_size.to(value)])
        dist.all_reduce(logged)
        total, sample_size = logged
        self.multiply_grads(dist.get_world_size() / sample_size)
        return total / sample_size


def plain():
    return MaskedLM()


def parallel(mesh):
    model = DistributedDataParallel(MaskedLM())
    return model, Trainer(model)


def loss(model, batch):
    value, sample_size = criterion(model, batch)
    return value / sample_size


def step(built, batch):
    return built[1].train_step(batch)


generator = torch.Generator().manual_seed(494)


def masked_sentences(number=8):
    text = torch.randint(1, VOCAB, (number, LENGTH), generator=generator)
    rates = torch.rand(number, 1, generator=generator) * 0.7
    masked = torch.rand(number, LENGTH, generator=generator) < rates
    return {"tokens": text.masked_fill(masked, MASK), "targets": text.masked_fill(~masked, PAD)}


batches = [masked_sentences() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    split="dp",
    ranks={"dp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

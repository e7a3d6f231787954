"""Instruction tuning of a decoder in a pipeline engine of three stages (1F1B over isend and recv) which loads data ahead.

Thread: deepspeedai/DeepSpeed issue #5729 "PipelineEngine calculates loss with outputs and labels from different batches" (2024):
the outputs of the first batch seem to be compared with the labels of the second one, seen only since their shapes differed.
Fault: Engine loads the next micro-batch before it computes the current one, but the last stage has a single buffer (stages minus
its own index); the labels of the next micro-batch replace those which the loss is about to read.
REPAIR: `self.slots = stages - index` -> `self.slots = stages - index + 1`
A right first sentence says: on the last stage the prefetched labels of the next micro-batch overwrite the current ones, because
it has one buffer only, so the loss compares the outputs of one micro-batch with the labels of the following one.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, ROWS, MICROBATCHES, IGNORE = 22, 12, 3, 9, 3, 8, 4, -100


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens):
        return self.words(tokens) + self.places.weight


class Chat(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embedding()
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))

    def keep(self, index, stages):
        if index > 0:
            self.embed = nn.Identity()
        if index < stages - 1:
            self.head = nn.Identity()
        for i in range(LAYERS):
            if i * stages // LAYERS != index:
                del self.layers[str(i)]
        return self

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def token_loss(logits, labels):
    return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="sum")


class Engine:
    """Runs one stage; micro-batch i lives in slot i modulo the number of slots."""

    def __init__(self, module, group):
        self.module, self.group = module, group
        index, stages = dist.get_rank(group), dist.get_world_size(group)
        self.first, self.last = index == 0, index == stages - 1
        self.before, self.after = index - 1, index + 1
        self.warmup = min(stages - 1 - index, MICROBATCHES)
        self.slots = stages - index

    def receive(self, source):
        x = torch.empty(ROWS // MICROBATCHES, LENGTH, WIDTH, dtype=torch.get_default_dtype())
        dist.recv(x, dist.get_global_rank(self.group, source), group=self.group)
        return x

    def send(self, x, target):
        x = x.contiguous()
        target = dist.get_global_rank(self.group, target)
        self.sent.append((x, dist.isend(x, target, group=self.group)))

    def load(self, i):
        if i < MICROBATCHES:
            self.tokens[i % self.slots], self.labels[i % self.slots] = self.data[i]

    def forward(self, i):
        slot = i % self.slots
        self.load(i + 1)
        x = self.tokens[slot] if self.first else self.receive(self.before).requires_grad_()
        y = self.module(x)
        if self.last:
            y = token_loss(y, self.labels[slot]) / self.count
            self.total += y.detach()
        else:
            self.send(y.detach(), self.after)
        self.flying.append((x, y))

    def backward(self):
        x, y = self.flying.pop(0)
        y.backward(None if self.last else self.receive(self.after))
        if not self.first:
            self.send(x.grad, self.before)

    def train_batch(self, tokens, labels):
        self.data = list(zip(tokens.chunk(MICROBATCHES), labels.chunk(MICROBATCHES)))
        self.tokens, self.labels = [None] * self.slots, [None] * self.slots
        self.count, self.total = (labels != IGNORE).sum(), torch.zeros(())
        self.flying, self.sent = [], []
        self.load(0)
        for i in range(self.warmup):
            self.forward(i)
        for i in range(self.warmup, MICROBATCHES):
            self.forward(i)
            self.backward()
        while self.flying:
            self.backward()
        for _, work in self.sent:
            work.wait()
        return self.total if self.last else None


def plain():
    return Chat()


def parallel(mesh):
    group = mesh.get_group("pp")
    module = Chat().keep(dist.get_rank(group), dist.get_world_size(group))
    return module, Engine(module, group)


def loss(model, batch):
    tokens, labels = batch
    return token_loss(model(tokens), labels) / (labels != IGNORE).sum()


def step(built, batch):
    return built[1].train_batch(*batch)


generator = torch.Generator().manual_seed(5729)


def conversations():
    text = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    prompts = torch.randint(1, LENGTH - 1, (ROWS, 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompts, IGNORE)
    return text[:, :-1].contiguous(), labels


batches = [conversations() for _ in range(3)]

arguments = plain, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 3})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

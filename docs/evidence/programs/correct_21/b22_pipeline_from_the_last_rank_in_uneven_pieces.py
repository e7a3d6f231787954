"""Instruction tuning in a pipeline from the last rank to the first, with micro-batches of different sizes.

Might be accused because: the first rank holds the last layers and the loss, the micro-batches have one, four and two rows with
different numbers of answer tokens, their losses are added without dividing by their number, and the backward passes run in the
order of the forward passes.
Correct because: each micro-batch's loss is a sum over its answer tokens, divided by the number of answer tokens of the whole
batch; every rank keeps outputs and inputs per micro-batch, so the order of the backward passes doesn't matter.
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import titanlite

VOCAB, WIDTH, HEADS, LENGTH, LAYERS, IGNORE = 21, 12, 2, 8, 4, -100
SIZES = 1, 4, 2
STARTS = 0, 1, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.glu(self.gate(self.norm_2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def cut(self, stage, stages):
        """Leaves the parameters of one stage."""
        bounds = STARTS[stage], STARTS[stage + 1]
        for i in range(LAYERS):
            if not bounds[0] <= i < bounds[1]:
                del self.layers[str(i)]
        if stage > 0:
            self.words = self.places = None
        if stage < stages - 1:
            self.norm = self.head = None
        return self

    def forward(self, x):
        if self.words is not None:
            x = self.words(x) + self.places.weight
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def answer_loss(logits, labels):
    return F.cross_entropy(logits.mT, labels, ignore_index=IGNORE, reduction="sum")


class Pipeline:
    def __init__(self, module, stage, stages, group):
        self.module, self.group = module, group
        self.first, self.last = stage == 0, stage == stages - 1
        rank = dist.get_rank(group)
        self.back = None if self.first else dist.get_global_rank(group, rank + 1)
        self.next = None if self.last else dist.get_global_rank(group, rank - 1)

    def receive(self, rows, source):
        x = torch.empty(rows, LENGTH, WIDTH, dtype=torch.get_default_dtype())
        dist.recv(x, source, group=self.group)
        return x

    def train(self, tokens, labels):
        count, total = (labels != IGNORE).sum(), None
        inputs, outputs = [], []
        for x, y in zip(tokens.split(SIZES), labels.split(SIZES)):
            if not self.first:
                x = self.receive(len(x), self.back).requires_grad_()
            inputs.append(x)
            outputs.append(self.module(x))
            if self.last:
                outputs[-1] = answer_loss(outputs[-1], y) / count
            else:
                dist.send(outputs[-1].detach().contiguous(), self.next, group=self.group)
        for x, y in zip(inputs, outputs):
            y.backward(None if self.last else self.receive(len(x), self.next))
            if not self.first:
                dist.send(x.grad.contiguous(), self.back, group=self.group)
        if self.last:
            total = torch.stack(outputs).sum().detach()
        return total


def plain():
    return Decoder()


def parallel(mesh):
    group, stages = mesh.get_group("pp"), mesh["pp"].size()
    stage = stages - 1 - dist.get_rank(group)
    module = Decoder().cut(stage, stages)
    return module, Pipeline(module, stage, stages, group)


def loss(model, batch):
    tokens, labels = batch
    return answer_loss(model(tokens), labels) / (labels != IGNORE).sum()


def step(built, batch):
    return built[1].train(*batch)


generator = torch.Generator().manual_seed(2222)


def conversations():
    text = torch.randint(0, VOCAB, (sum(SIZES), LENGTH + 1), generator=generator)
    prompts = torch.randint(1, LENGTH, (sum(SIZES), 1), generator=generator)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) < prompts, IGNORE)
    return text[:, :-1].contiguous(), labels


batches = [conversations() for _ in range(3)]

arguments = plain, parallel
options = dict(
    batches=batches,
    loss=loss,
    step=step,
    ranks={"pp": 2},
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

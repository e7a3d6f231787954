"""Truncated backpropagation through time in a pipeline by hand: each stage keeps its GRU's last state of every microbatch.

Thread: of the kind dhruvramani/Transformers-RL issue #7 "Bugs report about memory mechanism" (2023) and pytorch/pytorch issue #44827
"Pipeline Parallelism in PyTorch" (2020).
Correct: a microbatch has the same rows in each step, so its state of the last segment belongs to the same texts. The states are
detached, and are kept by the microbatch's number although the microbatches run from the last one to the first.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEGMENT, ROWS, MICROBATCHES = 11, 8, 4, 6, 3


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(DIM), nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x, state):
        y, state = self.gru(self.norm(x), state)
        return x + y, state.detach()


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({"lower": Recurrent(), "upper": Recurrent()})
        self.head = nn.Linear(DIM, VOCAB)
        self.states = {}

    def forward(self, x, number=0):
        x = x if self.embed is None else self.embed(x)
        for name, layer in self.layers.items():
            x, self.states[number, name] = layer(x, self.states.get((number, name)))
        return x if self.head is None else self.head(x)


def criterion(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return criterion(model(batch["text"]), batch["next"])


def parallel(mesh):
    model, index = LanguageModel(), mesh.get_local_rank("pp")
    name = ("lower", "upper")[index]
    model.layers = nn.ModuleDict({name: model.layers[name]})
    if index == 0:
        model.head = None
    else:
        model.embed = None
    return model


def step(stage, batch):
    texts, nexts = batch["text"].chunk(MICROBATCHES), batch["next"].chunk(MICROBATCHES)
    total = 0
    for number in reversed(range(MICROBATCHES)):
        if dist.get_rank() == 0:
            out = stage(texts[number], number)
            dist.send(out.detach(), 1)
            grad = torch.empty(out.shape)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            x = torch.empty(ROWS // MICROBATCHES, SEGMENT, DIM)
            dist.recv(x, 0)
            x.requires_grad_()
            value = criterion(stage(x, number), nexts[number]) / MICROBATCHES
            value.backward()
            dist.send(x.grad, 0)
            total += value.detach()
    return None if dist.get_rank() == 0 else total


rng = torch.Generator().manual_seed(425)
text = torch.randint(VOCAB, (ROWS, 3 * SEGMENT + 1), generator=rng)
batches = [
    {"text": text[:, i : i + SEGMENT], "next": text[:, i + 1 : i + SEGMENT + 1]}
    for i in range(0, 3 * SEGMENT, SEGMENT)
]
arguments = LanguageModel, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Transformer-XL as a pipeline by hand: every stage keeps the hidden states of the last segment as its memory.

Thread: of the kind dhruvramani/Transformers-RL issue #7 "Bugs report about memory mechanism" (2023) and kimiyoung/transformer-xl
issue #118 "wrong argument order of _update_mems function!" (2020), in a pipeline with microbatches.
Fault: in step, the memory is kept by the number of the stage, not by that of the microbatch, so each microbatch attends to the
memory that the one before it has left, and the first one to that of the last one.
REPAIR: `slot = rank` -> `slot = i`
A right first sentence says: in step 1 already, the second microbatch (rows 3 to 5) is wrong from the attention of the first
layer (layers.0) on, the first microbatch agrees: all microbatches share one memory, so a microbatch reads the hidden states of
other rows, those of the microbatch before it.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import titanlite

VOCAB, DIM, SEGMENT, ROWS, MICROBATCHES = 12, 8, 4, 6, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.kv = nn.Linear(DIM, 2 * DIM, bias=False)
        self.norm, self.mlp = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x, memory=None):
        context = x if memory is None else torch.cat([memory, x], 1)
        old = context.shape[1] - x.shape[1]
        q, (k, v) = self.q(x), self.kv(context).chunk(2, -1)
        later = torch.ones(x.shape[1], context.shape[1], dtype=torch.bool).triu(old + 1)
        scores = (q @ k.transpose(-1, -2) / DIM**0.5).masked_fill(later, -torch.inf)
        y = x + self.o(scores.softmax(-1) @ v)
        return y + gelu(self.mlp(self.norm(y)))


class TransformerXL(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_emb = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(4)})
        self.out = nn.Linear(DIM, VOCAB)
        self.mems = {}

    def forward(self, x, slot=0):
        x = x if self.word_emb is None else self.word_emb(x)
        for name, layer in self.layers.items():
            memory = self.mems.get((slot, name))
            self.mems[slot, name] = x.detach()
            x = layer(x, memory)
        return x if self.out is None else self.out(x)


def criterion(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss(model, batch):
    return criterion(model(batch["data"]), batch["target"])


def parallel(mesh):
    model, index = TransformerXL(), mesh.get_local_rank("pp")
    model.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in (2 * index, 2 * index + 1)})
    if index == 0:
        model.out = None
    else:
        model.word_emb = None
    return model


def step(stage, batch):
    rank, outputs, inputs, total = dist.get_rank(), [], [], 0
    chunks = zip(batch["data"].chunk(MICROBATCHES), batch["target"].chunk(MICROBATCHES))
    for i, (x, target) in enumerate(chunks):
        slot = rank
        if rank == 0:
            outputs.append(stage(x, slot))
            dist.send(outputs[i].detach(), 1)
        else:
            x = torch.empty(ROWS // MICROBATCHES, SEGMENT, DIM)
            dist.recv(x, 0)
            inputs.append(x.requires_grad_())
            outputs.append(criterion(stage(x, slot), target) / MICROBATCHES)
    for i, out in enumerate(outputs):
        if rank == 0:
            grad = torch.empty(out.shape)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            out.backward()
            dist.send(inputs[i].grad, 0)
            total += out.detach()
    return None if rank == 0 else total


rng = torch.Generator().manual_seed(404)
text = torch.randint(VOCAB, (ROWS, 3 * SEGMENT + 1), generator=rng)
batches = [
    {"data": text[:, i : i + SEGMENT], "target": text[:, i + 1 : i + SEGMENT + 1]}
    for i in range(0, 3 * SEGMENT, SEGMENT)
]
arguments = TransformerXL, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"pp": 2})

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

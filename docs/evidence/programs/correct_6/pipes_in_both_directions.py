"""Two pipelines in opposite directions over the same ranks; corresponding stages add up their gradients.

Thread: https://github.com/pytorch/PiPPy/pull/276 "Double pipe scheme", 2022-07-11 (a conjugate pipe pushes chunks in a
reverse direction; corresponding stages synchronize gradients).
Right: rank r holds the stages r and 3 - r. Four microbatches go down and two go up; each has a sixth of the loss. The
mirrored ranks exchange their gradients by name.
Must not be accused: parameters that two ranks hold, gradients that are partial until the exchange, unequal numbers of
microbatches in the two directions, two ranks that each have a part of the loss.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

VOCAB, DIM, SEQ, RANKS, DOWN, UP = 11, 8, 5, 4, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.LayerNorm(DIM), nn.GRU(DIM, DIM, batch_first=True)

    def forward(self, x):
        return x + self.rnn(self.norm(x))[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(RANKS)})

    def stage(self, i, x):
        x = self.blocks[str(i)](self.embed(x) if i == 0 else x)
        return self.head(x) if i == RANKS - 1 else x

    def forward(self, tokens):
        x = tokens
        for i in range(RANKS):
            x = self.stage(i, x)
        return x


def parallel(mesh):
    model, rank = Model(), mesh.get_local_rank("pp")
    kept = {rank, RANKS - 1 - rank}
    model.blocks = nn.ModuleDict({str(i): model.blocks[str(i)] for i in sorted(kept)})
    if 0 not in kept:
        model.embed = model.head = None
    return model


def run_forward(model, index, hop, tokens, labels):
    rank, x = dist.get_rank(), tokens
    if index > 0:
        x = torch.empty(*tokens.shape, DIM)
        dist.recv(x, rank - hop)
        x.requires_grad_()
    out = model.stage(index, x)
    if index < RANKS - 1:
        dist.send(out.detach(), rank + hop)
    else:
        out = cross_entropy(out.flatten(0, 1), labels.flatten()) / (DOWN + UP)
    return x, out


def run_backward(index, hop, x, out):
    rank, grad = dist.get_rank(), None
    if index < RANKS - 1:
        grad = torch.empty_like(out)
        dist.recv(grad, rank + hop)
    out.backward(grad)
    if index > 0:
        dist.send(x.grad, rank - hop)


def exchange_gradients(model):
    rank, peer = dist.get_rank(), RANKS - 1 - dist.get_rank()
    for _, p in sorted(model.named_parameters()):
        other = torch.empty_like(p)
        if rank < peer:
            dist.send(p.grad, peer)
            dist.recv(other, peer)
        else:
            dist.recv(other, peer)
            dist.send(p.grad, peer)
        p.grad += other


def step(model, batch):
    rank, value = dist.get_rank(), torch.zeros(())
    parts = list(zip(batch["tokens"].chunk(DOWN + UP), batch["labels"].chunk(DOWN + UP)))
    pipes = (rank, 1, parts[:DOWN]), (RANKS - 1 - rank, -1, parts[DOWN:])
    saved = [[run_forward(model, i, hop, *part) for part in own] for i, hop, own in pipes]
    for (index, hop, _), passes in zip(pipes, saved):
        for x, out in passes:
            run_backward(index, hop, x, out)
            if index == RANKS - 1:
                value += out.detach()
    exchange_gradients(model)
    dist.all_reduce(value)
    return value


def loss(model, batch):
    return cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


generator = torch.Generator().manual_seed(276)
batches = [
    {n: torch.randint(VOCAB, (6, SEQ), generator=generator) for n in ("tokens", "labels")}
    for _ in range(3)
]
arguments = Model, parallel
options = dict(batches=batches, loss=loss, ranks={"pp": RANKS}, step=step)

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

"""Low-rank adapters that start from a singular value decomposition, made on the first rank and broadcast; data parallel by hand.

Thread: pytorch/pytorch issue #74809 "Incorrect results for `torch.distributed.gather` for tensor created from permuted NumPy
array" (2022, gloo, without an error) and #62283 "c10d and discontiguous tensors with mismatch strides" (2021); the adapters are
those of huggingface/peft pull request #1626 "Adding PiSSA as an optional initialization method of LoRA" (2024).
Fault: in Adapted, the factors on the first rank lie in memory column by column, as torch.linalg.svd returns them, and on the
other rank row by row; broadcast and all_reduce take the memory in its order, so the other rank's elements are permuted.
REPAIR: `self.a.data, self.b.data = a, b` -> `self.a.data, self.b.data = a.contiguous(), b.contiguous()`
A right first sentence says: at the start the adapters a and b of rank 1 are not those of rank 0 (a permutation of their elements:
the transposed read in row order), while the frozen weights agree: the factors on rank 0 are not contiguous (column-major from
svd) when they are broadcast, and their gradients are reduced in different memory orders too.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import titanlite

INPUTS, WIDTH, CLASSES, RANK = 6, 10, 4, 3


class Adapted(nn.Module):
    def __init__(self, inputs, outputs, decompose):
        super().__init__()
        base = nn.Linear(inputs, outputs)
        self.weight = nn.Parameter(base.weight.detach(), requires_grad=False)
        self.bias = nn.Parameter(base.bias.detach(), requires_grad=False)
        self.a = nn.Parameter(torch.zeros(RANK, inputs))
        self.b = nn.Parameter(torch.zeros(outputs, RANK))
        if decompose:
            u, s, vh = torch.linalg.svd(self.weight.detach(), full_matrices=False)
            root = s[:RANK].sqrt()
            a, b = root[:, None] * vh[:RANK], u[:, :RANK] * root
            self.a.data, self.b.data = a, b
            self.weight.data -= b @ a

    def forward(self, x):
        return x @ self.weight.T + self.bias + x @ self.a.T @ self.b.T


class Classifier(nn.Module):
    def __init__(self, decompose=True):
        super().__init__()
        self.first = Adapted(INPUTS, WIDTH, decompose)
        self.second = Adapted(WIDTH, WIDTH, decompose)
        self.classes = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.classes(torch.tanh(self.second(torch.tanh(self.first(x)))))


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["label"])


def parallel(mesh):
    """The decomposition of a large model takes minutes: only the first rank makes it."""
    model = Classifier(decompose=dist.get_rank() == 0)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    return model


def step(model, batch):
    value = loss(model, batch)
    value.backward()
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    return value.detach()


rng = torch.Generator().manual_seed(505)
batches = [
    {
        "x": torch.randn(8, INPUTS, generator=rng),
        "label": torch.randint(CLASSES, (8,), generator=rng),
    }
    for _ in range(3)
]
arguments = Classifier, parallel
options = dict(batches=batches, loss=loss, step=step, ranks={"dp": 2}, split="dp")

if __name__ == "__main__":
    print(titanlite.compare(*arguments, **options))

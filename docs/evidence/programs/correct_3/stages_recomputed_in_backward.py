"""A pipeline whose stages keep only their inputs and run forward again in the backward pass.

Thread: https://github.com/pytorch/pytorch/issues/23822 "Implementing multiple recomputations on top of
`torch.utils.checkpoint`" (why detach the inputs before recomputing?), 2019-08-05.
Right: the first forward pass runs without gradients, only to send its output on. The second one starts from
the detached input and is backpropagated with the gradient that comes back.
Must not be accused: that each microbatch runs twice through a stage, or that the first pass has no graph.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import smooth_l1_loss

import titanlite

FEATURES, WIDTH, STAGES, MICROBATCHES = 5, 14, 3, 3


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.sigmoid(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.ModuleDict({str(i): Residual() for i in range(STAGES)})
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = x if self.first is None else self.first(x)
        for layer in self.middle.values():
            x = layer(x)
        return x if self.last is None else self.last(x)


def partition(mesh):
    net, index = Net(), mesh.get_local_rank("pp")
    net.middle = nn.ModuleDict({str(index): net.middle[str(index)]})
    net.first = net.first if index == 0 else None
    net.last = net.last if index == STAGES - 1 else None
    return net


def forward_pass(stage, rank, batch):
    kept = []
    for x in batch["x"].chunk(MICROBATCHES):
        if rank > 0:
            x = torch.empty(len(x), WIDTH)
            dist.recv(x, rank - 1)
        kept.append(x)
        if rank < STAGES - 1:
            with torch.no_grad():
                dist.send(stage(x), rank + 1)
    return kept


def backward_pass(stage, rank, batch, kept):
    total = 0
    for x, target in zip(kept, batch["y"].chunk(MICROBATCHES)):
        x = x.detach().requires_grad_(rank > 0)
        out = stage(x)
        if rank == STAGES - 1:
            value = smooth_l1_loss(out, target) / MICROBATCHES
            value.backward()
            total += value.detach()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            torch.autograd.backward(out, grad)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total if rank == STAGES - 1 else None


def step(stage, batch):
    rank = dist.get_rank()
    return backward_pass(stage, rank, batch, forward_pass(stage, rank, batch))


def loss(net, batch):
    return smooth_l1_loss(net(batch["x"]), batch["y"])


rng = torch.Generator().manual_seed(23822)
batches = [
    {"x": torch.randn(6, FEATURES, generator=rng), "y": torch.randn(6, 2, generator=rng)}
    for _ in range(3)
]

if __name__ == "__main__":
    options = dict(batches=batches, loss=loss, ranks={"pp": 3}, step=step)
    print(titanlite.compare(Net, partition, **options))

"""A pipeline of two stages by hand: one forward, one backward."""

import sys
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import titanlite


def model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


def loss(model, batch):
    return mse_loss(model(batch), batch)


def stage():
    layers = list(model().named_children())
    return nn.Sequential(OrderedDict(layers[:2] if dist.get_rank() == 0 else layers[2:]))


def step(stage, batch):
    return (first if dist.get_rank() == 0 else last)(stage, batch.chunk(4))


def first(stage, microbatches):
    outputs = []
    for x in microbatches:
        outputs.append(stage(x))
        dist.send(outputs[-1].detach(), 1)
        if len(outputs) == 2:  # the last stage has the next microbatch already
            backward(outputs.pop(0))
    if "--corrected" in sys.argv:
        backward(outputs.pop(0))


def backward(output):
    gradient = torch.empty_like(output)
    dist.recv(gradient, 1)
    output.backward(gradient)


def last(stage, microbatches):
    total, stage.sent = 0.0, []
    for target in microbatches:
        x = torch.empty(len(target), 32, requires_grad=True)
        dist.recv(x.data, 0)
        value = mse_loss(stage(x), target) / len(microbatches)
        value.backward()
        stage.sent.append(dist.isend(x.grad, 0))
        total += value.detach()
    return total


torch.manual_seed(1)
batch = torch.randn(8, 8)
options = {"batches": [batch], "loss": loss, "ranks": {"pp": 2}, "step": step, "threads": True}
print(titanlite.compare(model, stage, **options))

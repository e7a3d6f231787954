"""Note 5: the backward pass of a layer whose weight is sharded by columns."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def column_backward(device, x, weight, dy):
    """The gradients [dx, dweight] of y = x weight, where this rank has some columns of the weight.

    `x` (batch, k) is the same on all ranks, `weight` is (k, n / W), and dy (batch, n / W) the
    gradient of this rank's columns of y. dx is that of the whole layer, on every rank.
    """
    return [device.all_reduce(dy @ weight.T), x.T @ dy]


def whole():
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(-4, 5, (6, 4 + 8 + 8), generator=generator).double()
    return draw[:, :4], draw[:4, 4:12], draw[:, 12:]


def inputs(rank):
    x, weight, dy = whole()
    return x, weight.chunk(4, 1)[rank], dy.chunk(4, 1)[rank]


def expected(inputs):
    x, weight, dy = whole()
    return [[dy @ weight.T, x.T @ mine] for _, _, mine in inputs]


EXERCISE = Exercise(
    solution=column_backward,
    hint="All columns of the weight contribute to dx; only this rank's columns to its dweight.",
    inputs=inputs,
    expected=expected,
)

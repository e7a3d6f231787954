"""Note 5: a layer whose weight is sharded by rows."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def row_parallel(device, x, weight):
    """x W on every rank, where this rank has columns of x and the same rows of W.

    `x` is (batch, k / W) and `weight` (k / W, n), which no rank has to gather.
    """
    return device.all_reduce(x @ weight)


def whole():
    generator = torch.Generator().manual_seed(0)
    draw = torch.randint(-4, 5, (8, 8 + 6), generator=generator).double()
    return draw[:5, :8], draw[:, 8:]


def inputs(rank):
    x, weight = whole()
    return x.chunk(4, 1)[rank], weight.chunk(4)[rank]


def expected(inputs):
    x, weight = whole()
    return [x @ weight] * 4


EXERCISE = Exercise(
    solution=row_parallel,
    hint="x W is a sum over k. Each rank can compute its own terms of that sum.",
    inputs=inputs,
    expected=expected,
)

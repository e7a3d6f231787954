"""Note 7: an SGD step of which each rank computes only its shard."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def zero_step(device, weight, gradient, lr):
    """The weight after one step of SGD with the gradients' mean, on every rank.

    `weight` is (W * n,), the same on all ranks; each rank has its own gradient of that shape.
    This rank updates only shard device.rank of W, and sends no more bytes than an all-reduce.
    """
    mean = device.reduce_scatter(gradient) / device.mesh.size
    shard = weight.chunk(device.mesh.size)[device.rank]
    return device.all_gather(shard - lr * mean)


def inputs(rank):
    return torch.arange(8.0), torch.arange(8.0) * (rank + 1), 0.5


def expected(inputs):
    mean = sum(gradient for _, gradient, _ in inputs) / 4
    return [inputs[0][0] - 0.5 * mean] * 4


EXERCISE = Exercise(
    solution=zero_step,
    hint="An all-reduce is a reduce-scatter and an all-gather. The step is between the two.",
    inputs=inputs,
    expected=expected,
    forbidden=("all_reduce",),
)

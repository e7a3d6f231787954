"""Note 4: average all gradients with a single all-reduce."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def average_gradients(device, gradients):
    """The mean over ranks of each gradient, as a list; call device.all_reduce once.

    `gradients` is a list of tensors of different shapes, the same on all ranks. A bucket, one flat
    tensor that holds all of them, costs the latency of one message instead of many.
    """
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    mean = device.all_reduce(bucket) / device.mesh.size
    parts = mean.split([gradient.numel() for gradient in gradients])
    return [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]


def inputs(rank):
    return ([torch.full((2, 3), rank + 1.0), torch.arange(4.0) * rank, torch.ones(2, 1)],)


def expected(inputs):
    by_gradient = zip(*(gradients for (gradients,) in inputs), strict=True)
    return [[sum(of_ranks) / 4 for of_ranks in by_gradient]] * 4


EXERCISE = Exercise(
    solution=average_gradients,
    hint="torch.cat of the flattened gradients; afterwards split(sizes), and view(shape) of each.",
    inputs=inputs,
    expected=expected,
)

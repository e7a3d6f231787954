"""Note 8: the norm of gradients sharded on one axis and replicated on another."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise
from titanlite.tools.lab.mesh import Mesh


def gradient_norm(device, sharded, replicated):
    """The norm of all gradients of a model on a mesh of dp=2 and tp=2, as a float.

    `sharded` is this rank's shard over tp of one gradient; `replicated` is another, which all ranks
    of tp have whole. Both have been averaged over dp already, so ranks along dp have the same.
    """
    squares = device.all_reduce(sharded.square().sum(), ["tp"]) + replicated.square().sum()
    return squares.sqrt().item()


def inputs(rank):
    tp = rank % 2
    return torch.tensor([[3.0, 0.0], [0.0, 4.0]])[tp], torch.tensor([12.0])


EXERCISE = Exercise(
    solution=gradient_norm,
    hint="Sum the squares over tp only, and only those of the shards: every other sum counts a "
    "gradient twice.",
    inputs=inputs,
    expected=lambda inputs: [13.0] * 4,
    mesh=Mesh(dp=2, tp=2),
)

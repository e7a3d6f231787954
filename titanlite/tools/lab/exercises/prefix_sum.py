"""Note 1: the sum of all ranks up to one's own, in a chain."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise
from titanlite.tools.lab.pictures import tagged


def prefix_sum(device, tensor):
    """The sum of the tensors of ranks 0 to device.rank (inclusive), with W - 1 messages in all.

    `tensor` must not change.
    """
    total = tensor.clone()
    if device.rank > 0:
        total += device.channel(device.rank - 1).recv(torch.empty_like(tensor))
    if device.rank < device.mesh.size - 1:
        device.channel(device.rank + 1).send(total)
    return total


EXERCISE = Exercise(
    solution=prefix_sum,
    hint="Rank 1 needs only rank 0's tensor. Rank 2 needs only what rank 1 has then.",
    inputs=lambda rank: (tagged(rank, 2),),
    expected=lambda inputs: [sum(one[0] for one in inputs[: rank + 1]) for rank in range(4)],
    forbidden=("all_gather", "all_reduce", "gather", "reduce", "scatter", "broadcast"),
    num_parts=2,
)

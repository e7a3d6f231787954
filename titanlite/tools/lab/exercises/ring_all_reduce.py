"""Note 2: the sum of all ranks' tensors with 2 (W-1)/W n bytes per rank."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise
from titanlite.tools.lab.pictures import tagged


def ring_all_reduce(device, tensor):
    """The sum of every rank's tensor (W elements), on every rank, in 2 (W - 1) steps.

    Every rank sends only to the next one, and one element at a time: first a reduce-scatter, then
    an all-gather. device.group() has rank, size and shift(tensor): send to the next rank while
    receiving from the previous one.
    """
    group = device.group()
    parts = list(tensor.chunk(group.size))
    for step in range(group.size - 1):
        received = group.shift(parts[(group.rank - step) % group.size])
        mine = (group.rank - step - 1) % group.size
        parts[mine] = parts[mine] + received
    for step in range(group.size - 1):
        received = group.shift(parts[(group.rank + 1 - step) % group.size])
        parts[(group.rank - step) % group.size] = received
    return torch.cat(parts)


EXERCISE = Exercise(
    solution=ring_all_reduce,
    hint="In step s of the first half, send part rank - s, and add what you receive to part "
    "rank - s - 1. Then rank r has the sum of part r + 1, and the second half forwards the sums.",
    inputs=lambda rank: (tagged(rank, 4),),
    expected=lambda inputs: [sum(one[0] for one in inputs)] * 4,
    forbidden=("all_reduce", "reduce_scatter", "all_gather", "reduce", "gather", "broadcast"),
    num_parts=4,
    points=5,
)

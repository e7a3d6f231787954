"""Note 2: every rank's tensor to all ranks, around a ring."""

from titanlite.tools.lab.exercises.exercise import Exercise
from titanlite.tools.lab.pictures import tagged


def ring_all_gather(device, tensor):
    """A list of every rank's tensor, in rank order, in W - 1 steps.

    Every rank sends only to the next one. device.group() has rank, size, isend(tensor, to),
    recv(like, source) and shift(tensor): send to the next rank while receiving from the previous.
    """
    group = device.group()
    gathered = {group.rank: tensor}
    for step in range(1, group.size):
        tensor = group.shift(tensor)
        gathered[(group.rank - step) % group.size] = tensor
    return [gathered[rank] for rank in range(group.size)]


EXERCISE = Exercise(
    solution=ring_all_gather,
    hint="Forward what you received last. After s steps, that is the tensor of rank - s.",
    inputs=lambda rank: (tagged(rank, 2),),
    expected=lambda inputs: [[one[0] for one in inputs]] * 4,
    forbidden=("all_gather", "gather", "broadcast", "all_reduce", "all_scatter"),
    num_parts=2,
)

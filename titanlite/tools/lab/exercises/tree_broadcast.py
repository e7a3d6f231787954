"""Note 2: one rank's tensor to all ranks in log2(W) steps."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise
from titanlite.tools.lab.mesh import Mesh
from titanlite.tools.lab.pictures import tagged


def tree_broadcast(device, tensor):
    """The tensor of rank 0, on every rank, in log2(W) steps and W - 1 messages; W is 8.

    In step k, each of the 2^k ranks that have the tensor sends it to one that has not. The other
    ranks pass a tensor of the same shape.
    """
    have = 1
    while have < device.mesh.size:
        if device.rank < have:
            device.channel(device.rank + have).send(tensor)
        elif device.rank < 2 * have:
            tensor = device.channel(device.rank - have).recv(torch.empty_like(tensor))
        have *= 2
    return tensor


EXERCISE = Exercise(
    solution=tree_broadcast,
    hint="If ranks 0 to n-1 have the tensor, rank r of them can send it to rank r + n.",
    inputs=lambda rank: (tagged(rank, 3),),
    expected=lambda inputs: [inputs[0][0]] * 8,
    mesh=Mesh(rank=8),
    forbidden=("broadcast", "all_gather", "all_reduce", "scatter"),
    num_parts=3,
)

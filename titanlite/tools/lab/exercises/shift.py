"""Note 1: send to the next rank while receiving from the previous one."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise
from titanlite.tools.lab.pictures import tagged


def shift(device, tensor):
    """The tensor of the previous rank; rank 0 gets that of the last one.

    Every rank calls this with a tensor of the same shape. Use device.rank, device.mesh.size and
    device.channel(peer), which has send, recv, isend and irecv.
    """
    sending = device.channel((device.rank + 1) % device.mesh.size).isend(tensor)
    received = device.channel((device.rank - 1) % device.mesh.size).recv(torch.empty_like(tensor))
    sending.wait()
    return received


EXERCISE = Exercise(
    solution=shift,
    hint="If all ranks wait in send, nobody receives. isend returns at once; wait for it later.",
    inputs=lambda rank: (tagged(rank, 4),),
    expected=lambda inputs: [inputs[rank - 1][0] for rank in range(4)],
    num_parts=4,
)

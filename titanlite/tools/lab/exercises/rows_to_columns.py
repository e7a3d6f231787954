"""Note 9: reshard a matrix from rows to columns."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def rows_to_columns(device, rows):
    """This rank's columns (n, m / W) of a matrix of which it has the rows (n / W, m).

    Every rank sends every other rank only what it needs: W (W - 1) messages of n m / W^2 elements.
    """
    group = device.group()
    parts = rows.chunk(group.size, 1)
    sending = [group.isend(parts[peer], peer) for peer in group.peers]
    received = [
        parts[rank] if rank == group.rank else group.recv(parts[rank], rank)
        for rank in range(group.size)
    ]
    for transfer in sending:
        transfer.wait()
    return torch.cat(received)


def inputs(rank):
    return (torch.arange(32.0).view(4, 8).chunk(4)[rank],)


EXERCISE = Exercise(
    solution=rows_to_columns,
    hint="It is an all-to-all: cut your rows into W blocks of columns, block r for rank r. "
    "device.group() has peers, isend(tensor, to) and recv(like, source).",
    inputs=inputs,
    expected=lambda inputs: torch.arange(32.0).view(4, 8).chunk(4, 1),
    algorithm="naive",
)

"""Note 12: an all-to-all with a different number of rows for each rank."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def uneven_all_to_all(device, rows, counts):
    """The rows that all ranks send to this one, in rank order; this rank's own are among them.

    The first counts[0] of the rows (n, D) go to rank 0, the next counts[1] to rank 1, and so on.
    `counts` is an int64 tensor of W elements, different on every rank. A receiver has to know how
    many rows will come: device.all_to_all(counts) tells it. device.group() has rank, size, peers,
    isend(tensor, to) and irecv(into, source), which return a transfer to wait for.
    """
    group = device.group()
    arriving = device.all_to_all(counts)
    outgoing = rows.split(counts.tolist())
    incoming = [rows.new_empty(number, rows.size(1)) for number in arriving.tolist()]
    incoming[group.rank] = outgoing[group.rank]
    transfers = [group.irecv(incoming[peer], peer) for peer in group.peers]
    transfers += [group.isend(outgoing[peer], peer) for peer in group.peers]
    for transfer in transfers:
        transfer.wait()
    return torch.cat(incoming)


COUNTS = ((1, 2, 1, 3), (2, 1, 3, 1), (1, 1, 2, 2), (3, 2, 1, 1))


def inputs(rank):
    counts = torch.tensor(COUNTS[rank])
    rows = torch.arange(2.0 * sum(COUNTS[rank])).view(-1, 2) + 100 * rank
    return rows, counts


def expected(inputs):
    parts = [rows.split(counts.tolist()) for rows, counts in inputs]
    return [torch.cat(of_target) for of_target in zip(*parts, strict=True)]


EXERCISE = Exercise(
    solution=uneven_all_to_all,
    hint="Two rounds: the counts by device.all_to_all, then the rows with isend and irecv. Start "
    "all transfers before you wait for one.",
    inputs=inputs,
    expected=expected,
    algorithm="naive",
    points=5,
)

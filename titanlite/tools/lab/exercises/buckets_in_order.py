"""Note 4: all-reduces in the same order on all ranks, whatever fills first."""

import torch

from titanlite.tools.lab.exercises.exercise import Exercise


def buckets_in_order(device, filled):
    """The sum over ranks of each bucket, as a list by number.

    `filled` has pairs of a number and a tensor, in the order in which this rank's backward pass
    fills its buckets; the order differs between ranks. Call device.all_reduce once for each bucket,
    as early as possible: when it is full and all buckets with lower numbers have been started.
    """
    full: dict = {}
    sums: list = []
    for number, bucket in filled:
        full[number] = bucket
        while len(sums) in full:
            sums.append(device.all_reduce(full[len(sums)]))
    return sums


ORDERS = ((0, 1, 2, 3), (1, 0, 2, 3), (3, 0, 1, 2), (0, 2, 1, 3))


def inputs(rank):
    return ([(number, torch.full((4,), 10.0**number + rank)) for number in ORDERS[rank]],)


def expected(inputs):
    sums = [sum(dict(filled)[number] for (filled,) in inputs) for number in range(4)]
    return [sums] * 4


EXERCISE = Exercise(
    solution=buckets_in_order,
    hint="All ranks must call all_reduce for the same bucket at the same time, so keep the buckets "
    "that are full too early.",
    inputs=inputs,
    expected=expected,
    points=5,
)

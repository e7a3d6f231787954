"""Collectives out of sends and receives, on values: each says what it moves, and in how many steps.

Numbers stand for tensors. `share` cuts one into parts that add up to it again, as a tensor is cut
along an axis that a sum runs over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlite.simulate.gpu import GPU


def share(value: int, part: int, parts: int) -> int:
    """Part `part` of `parts`, all of which add up to `value`."""
    return value * (part + 1) // parts - value * part // parts


def ring_all_reduce(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: float, value: int
) -> int:
    """The sum over `ranks`, on all of them: 2 (N - 1) steps of 1/N of the data.

    First each part collects its sum on its way round the ring, then the sums go round.
    Gibiansky 2017, https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/.
    """
    size = len(ranks)
    here = ranks.index(gpu.global_rank)
    after, before = ranks[(here + 1) % size], ranks[here - 1]
    parts = [share(value, part, size) for part in range(size)]
    for step in range(2 * (size - 1)):
        outgoing, incoming = (here - step) % size, (here - step - 1) % size
        part = gpu.exchange(after, before, description, size_units / size, parts[outgoing])
        parts[incoming] = part if step >= size - 1 else parts[incoming] + part
    return sum(parts)


def relay_sum(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: float, value: int
) -> int:
    """The whole data passed once round the ring, one rank after the other: N sends, N receives.

    Only the first rank ends with the sum, the others with that of the ranks up to them: to tell
    everyone would take another N - 1 hops.
    """
    size = len(ranks)
    here = ranks.index(gpu.global_rank)
    if size == 1:
        return value
    after, before = ranks[(here + 1) % size], ranks[here - 1]
    if here:
        value += gpu.receive(before, description, size_units)
    gpu.send(after, description, size_units, value)
    return value if here else gpu.receive(before, description, size_units)


def ring_all_gather(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: float, value: Any
) -> list[Any]:
    """The values of all `ranks` by rank: N - 1 steps, each passing on one rank's `size_units`."""
    size = len(ranks)
    here = ranks.index(gpu.global_rank)
    after, before = ranks[(here + 1) % size], ranks[here - 1]
    values = [value] * size
    for step in range(size - 1):
        outgoing, incoming = (here - step) % size, (here - step - 1) % size
        values[incoming] = gpu.exchange(after, before, description, size_units, values[outgoing])
    return values


def all_to_all(
    gpu: GPU, ranks: Sequence[int], description: str, unit_size: float, values: Sequence[list[Any]]
) -> list[list[Any]]:
    """`values[i]` goes to the i-th of `ranks`: N - 1 steps, each a message to another rank.

    A message takes `unit_size` an element of its list, and a latency even if that is empty.
    """
    size = len(ranks)
    here = ranks.index(gpu.global_rank)
    received: list[list[Any]] = [list(values[here]) for _ in ranks]
    for step in range(1, size):
        target, source = (here + step) % size, (here - step) % size
        message = values[target]
        received[source] = gpu.exchange(
            ranks[target], ranks[source], description, unit_size * len(message), message
        )
    return received

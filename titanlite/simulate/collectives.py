"""Collectives built from sends and receives. Each states its number of steps and message sizes.

Integers stand for tensors. `share` splits an integer into parts that sum to it, just as a matrix
product splits into partial sums along its contracted axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from titanlite.simulate.gpu import GPU


def share(value: int, part: int, parts: int) -> int:
    """Part number `part` of `parts`; the parts sum to `value`."""
    return value * (part + 1) // parts - value * part // parts


def ring_all_reduce(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: float, value: int
) -> int:
    """All-reduce: every rank gets the sum over `ranks`, in 2 (N - 1) steps of 1/N of the data.

    A reduce-scatter around the ring, then an all-gather around the ring.
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
    """Pass the whole data once around the ring, one rank after the other: N sends, N receives.

    Only the first rank ends with the full sum; each other rank ends with the sum of the ranks up to
    itself. Sending the full sum to all ranks would take another N - 1 hops.
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
    """The values of all `ranks`, in order: N - 1 steps, each sends one rank's `size_units`."""
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
    """Send `values[i]` to the i-th of `ranks`: N - 1 steps, each a message to another rank.

    A message has size `unit_size` per element of its list; an empty one still costs a latency.
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

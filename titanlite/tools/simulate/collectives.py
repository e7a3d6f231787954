"""Collectives built from sends and receives. Each states its number of steps and message sizes.

A value is a list of numbers or a matrix, which stands for a tensor. Sizes are given in units of
data, independent of the number of elements. The last three functions are for matrices of
integer_model.py.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from titanlite.tools.simulate.exact import Number, exact
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.integer_model import Matrix, flatten, split, unflatten


def ring_all_reduce(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: Number, values: Sequence[int]
) -> list[int]:
    """All-reduce: every rank gets the sums over `ranks`, in 2 (N - 1) steps of 1/N of the data.

    A reduce-scatter around the ring, then an all-gather around the ring.
    Gibiansky 2017, https://andrew.gibiansky.com/blog/machine-learning/baidu-allreduce/.
    """
    parts = [split(values, part, len(ranks)) for part in range(len(ranks))]
    mine = ring_reduce_scatter(gpu, ranks, description, size_units, parts)
    gathered = ring_all_gather(gpu, ranks, description, _part(size_units, ranks), mine)
    return [number for part in gathered for number in part]


def ring_reduce_scatter(
    gpu: GPU,
    ranks: Sequence[int],
    description: str,
    size_units: Number,
    parts: Sequence[Sequence[int]],
) -> list[int]:
    """The i-th of `ranks` gets the sum of all i-th parts: N - 1 steps of 1/N of `size_units`."""
    size, here, after, before = _place(gpu, ranks)
    part = _part(size_units, ranks)
    sums = [list(each) for each in parts]
    for step in range(1, size):
        outgoing, incoming = (here - step) % size, (here - step - 1) % size
        message = gpu.exchange(after, before, description, part, sums[outgoing])
        sums[incoming] = [a + b for a, b in zip(sums[incoming], message, strict=True)]
    return sums[here]


def relay_sum(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: Number, values: Sequence[int]
) -> list[int]:
    """Pass the whole data once around the ring, one rank after the other: N sends, N receives.

    The first rank ends with the full sum; each other rank ends with the sum of the ranks up to
    itself. Sending the full sum to all ranks would take another N - 2 hops.
    """
    size = len(ranks)
    here = ranks.index(gpu.global_rank)
    sums = list(values)
    if size == 1:
        return sums
    after, before = ranks[(here + 1) % size], ranks[here - 1]
    if here:
        received = gpu.receive(before, description, size_units)
        sums = [a + b for a, b in zip(sums, received, strict=True)]
    gpu.send(after, description, size_units, sums)
    return sums if here else gpu.receive(before, description, size_units)


def ring_all_gather(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: Number, value: Any
) -> list[Any]:
    """The values of all `ranks`, in order: N - 1 steps, each sends one rank's `size_units`."""
    size, here, after, before = _place(gpu, ranks)
    values = [value] * size
    for step in range(size - 1):
        outgoing, incoming = (here - step) % size, (here - step - 1) % size
        values[incoming] = gpu.exchange(after, before, description, size_units, values[outgoing])
    return values


def all_to_all(
    gpu: GPU, ranks: Sequence[int], description: str, unit_size: Number, values: Sequence[list[Any]]
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
        units = exact(unit_size, description) * len(message)
        received[source] = gpu.exchange(ranks[target], ranks[source], description, units, message)
    return received


def all_reduce_matrix(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: Number, matrix: Matrix
) -> Matrix:
    total = ring_all_reduce(gpu, ranks, description, size_units, flatten([matrix]))
    return unflatten(total, [matrix])[0]


def gather_rows(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: Number, rows: Matrix
) -> Matrix:
    """All-gather: the rows of all `ranks`, in order; the whole has `size_units`."""
    parts = ring_all_gather(gpu, ranks, description, _part(size_units, ranks), rows)
    return [row for part in parts for row in part]


def scatter_rows(
    gpu: GPU, ranks: Sequence[int], description: str, size_units: Number, matrix: Matrix
) -> Matrix:
    """Reduce-scatter: this rank's rows of the sum of the matrices, each of `size_units`."""
    parts = [list(split(matrix, part, len(ranks))) for part in range(len(ranks))]
    own = parts[ranks.index(gpu.global_rank)]
    total = ring_reduce_scatter(
        gpu, ranks, description, size_units, [flatten([part]) for part in parts]
    )
    return unflatten(total, [own])[0]


def _place(gpu: GPU, ranks: Sequence[int]) -> tuple[int, int, int, int]:
    """The size of the ring, the GPU's place in it, and the ranks after and before it."""
    size, here = len(ranks), ranks.index(gpu.global_rank)
    return size, here, ranks[(here + 1) % size], ranks[here - 1]


def _part(size_units: Number, ranks: Sequence[int]) -> Fraction:
    return Fraction(exact(size_units, "size_units")) / len(ranks)

"""An estimate of what a simulation takes; sizes that cannot be simulated are refused before it."""

import os
from collections.abc import Sequence

from titanlite.quantities import format_bytes
from titanlite.tools.simulate.work import SimulationError

MOST_SECONDS = 600.0

# Measured with CPython 3.11 on one core of a small virtual machine, rounded up.
# Bytes and seconds of each.
_WORK_ITEM, _LISTED_ITEM = (60, 2e-6), (200, 4e-6)  # listed: the order of each worker is a list
_WORKER, _DRAWN_CELL = (500, 2e-6), (700, 10e-6)


def check_size(
    num_workers: int, num_stages: int, num_batches: int, *, is_listed: bool = False
) -> None:
    """Raise SimulationError if the simulation would take over ten minutes or too much memory.

    `is_listed` says that the order of each worker is a list, which takes more.
    """
    items = 2 * num_stages * num_batches
    _check(
        f"{num_workers:,} workers, {num_stages:,} stages and {num_batches:,} batches make "
        f"{items:,} work items, which",
        [(items, *(_LISTED_ITEM if is_listed else _WORK_ITEM)), (num_workers, *_WORKER)],
        "simulate fewer workers, stages or batches",
    )


def check_drawing(num_cells: int) -> None:
    """Raise SimulationError if a picture of so many cells would take too long or too much."""
    _check(
        f"a picture of {num_cells:,} cells",
        [(num_cells, *_DRAWN_CELL)],
        "draw fewer workers, stages or batches, or only print the figures",
    )


def _check(what: str, parts: Sequence[tuple[int, int, float]], instead: str) -> None:
    """Raise SimulationError if the `parts`, each (count, bytes, seconds), are too much."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    num_bytes = sum(count * each for count, each, _ in parts)
    seconds = sum(count * each for count, _, each in parts)
    if num_bytes > memory or seconds > MOST_SECONDS:
        raise SimulationError(
            f"{what} would take about {_time(seconds)} and {format_bytes(num_bytes)} of memory; "
            f"the limits are {_time(MOST_SECONDS)} and this machine's {format_bytes(memory)}; "
            f"{instead}"
        )


def _time(seconds: float) -> str:
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{round(seconds / length):,} {unit}"
    return f"{round(seconds)} seconds"

"""An estimate of what a simulation takes; sizes that cannot be simulated are refused before it."""

from __future__ import annotations

import os

from titanlite.tools.simulate.work import SimulationError

MOST_SECONDS = 600.0

# Measured with CPython 3.11 on one core of a small virtual machine, rounded up.
_BYTES_PER_WORK_ITEM, _SECONDS_PER_WORK_ITEM = 60, 2e-6
_BYTES_PER_LISTED_ITEM, _SECONDS_PER_LISTED_ITEM = 200, 4e-6  # the order of each worker is a list
_BYTES_PER_WORKER, _SECONDS_PER_WORKER = 500, 2e-6
_BYTES_PER_DRAWN_CELL, _SECONDS_PER_DRAWN_CELL = 700, 10e-6


def check_size(
    num_workers: int, num_stages: int, num_batches: int, *, is_listed: bool = False
) -> None:
    """Raise SimulationError if the simulation would take over ten minutes or too much memory.

    `is_listed` says that the order of each worker is a list, which takes more.
    """
    items = 2 * num_stages * num_batches
    each = _BYTES_PER_LISTED_ITEM if is_listed else _BYTES_PER_WORK_ITEM
    each_seconds = _SECONDS_PER_LISTED_ITEM if is_listed else _SECONDS_PER_WORK_ITEM
    _check(
        f"{num_workers:,} workers, {num_stages:,} stages and {num_batches:,} batches make "
        f"{items:,} work items, which",
        items * each + num_workers * _BYTES_PER_WORKER,
        items * each_seconds + num_workers * _SECONDS_PER_WORKER,
        "simulate fewer workers, stages or batches",
    )


def check_drawing(num_cells: int) -> None:
    """Raise SimulationError if a picture of so many cells would take too long or too much."""
    _check(
        f"a picture of {num_cells:,} cells",
        num_cells * _BYTES_PER_DRAWN_CELL,
        num_cells * _SECONDS_PER_DRAWN_CELL,
        "draw fewer workers, stages or batches, or only print the figures",
    )


def _check(what: str, num_bytes: int, seconds: float, instead: str) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > memory or seconds > MOST_SECONDS:
        raise SimulationError(
            f"{what} would take about {_time(seconds)} and {_memory(num_bytes)} of memory; the "
            f"limits are {_time(MOST_SECONDS)} and this machine's {_memory(memory)}; {instead}"
        )


def _time(seconds: float) -> str:
    for unit, length in (("years", 31_557_600), ("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{round(seconds / length):,} {unit}"
    return f"{round(seconds)} seconds"


def _memory(num_bytes: int) -> str:
    gib = -(-num_bytes // 2**30)
    return f"{gib:,} GiB"

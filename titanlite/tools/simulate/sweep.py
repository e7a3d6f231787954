"""`--sweep workers=4,8,16 batches=8:64:8`: a scheme at all points of a grid.

`read_axes` reads the axes, `run_sweep` runs the points and survives Ctrl-C, and `mark_fronts` finds
the points that no other point beats.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from math import prod
from typing import Any, NamedTuple

from titanlite.errors import TitanliteError
from titanlite.tools.simulate.figures import Row
from titanlite.tools.simulate.work import SimulationError

MOST_POINTS = 100_000
_NUMBER = re.compile(r"(.*?[0-9.])\s*([A-Za-z/]*)")
# These say how a job is run. The other axes say which job it is, so that makespans differ anyway.
PLAN_AXES = ("workers", "group_size", "priority", "max_in_flight", "prefetch")

Point = Mapping[str, Any]


@dataclass
class Swept:
    """The rows of the points that ran, and how many points were asked for.

    The values of a row are the scheme, the point's values, and the figures, by name. `failed`
    counts the points that cannot run, by reason; `first_failed` has the first of them.
    """

    num_points: int
    rows: list[Row] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    first_failed: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False

    @property
    def num_done(self) -> int:
        return len(self.rows) + self.failed.total()


class Fronts(NamedTuple):
    """By row, whether no other row has a smaller bubble and less memory, and so on."""

    memory: list[bool]
    workers: list[bool]


def read_axes(
    texts: Sequence[str], reader_of: Callable[[str], Callable[[str], Any] | None]
) -> dict[str, list[Any]]:
    """The values of each axis. `reader_of(name)` reads a value of an option, None if there is none.

    An axis is NAME=VALUES: values and ranges FIRST:LAST or FIRST:LAST:STEP, which contain LAST,
    with commas between. Raises SimulationError.
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        written, equals, values = text.partition("=")
        name = written.removeprefix("--").replace("-", "_")
        reader = reader_of(name)
        if not equals or reader is None:
            raise SimulationError(
                f"--sweep: {text!r} is no axis; give OPTION=VALUES, as in workers=4,8 or "
                "batches=8:64:8"
            )
        if name in axes:
            raise SimulationError(f"--sweep: {written} is given twice; put all values in one list")
        try:
            found = [value for part in values.split(",") for value in _read_part(part, reader)]
        except argparse.ArgumentTypeError as error:
            raise SimulationError(f"--sweep {written}: {error}") from None
        axes[name] = list(dict.fromkeys(found))
    num_points = prod(len(values) for values in axes.values())
    if num_points > MOST_POINTS:
        raise SimulationError(
            f"--sweep: {num_points:,} points are too many; give at most {MOST_POINTS:,}"
        )
    return axes


def _read_part(text: str, reader: Callable[[str], Any]) -> Iterator[Any]:
    """The values of "8" or of "8:64:8"."""
    ends = text.split(":")
    if len(ends) == 1:
        yield reader(text)
        return
    for end in ends:
        reader(end)
    parts = [_NUMBER.fullmatch(end.strip()) for end in ends]
    units = {part[2] for part in parts if part is not None}
    try:
        # As fractions, so that 0.1:0.3:0.1 ends at 0.3.
        numbers = [Fraction(part[1]) for part in parts if part is not None]
        first, last, step = (*numbers, Fraction(1))[:3]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range FIRST:LAST:STEP") from None
    if len(ends) > 3 or len(units) > 1 or step <= 0 or last < first:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range; give FIRST:LAST or FIRST:LAST:STEP, with a STEP above 0 and "
            "all in one unit"
        )
    if (last - first) / step > MOST_POINTS:
        raise argparse.ArgumentTypeError(f"{text!r} has more than {MOST_POINTS:,} values")
    while first <= last:
        value = str(first) if first.denominator == 1 else repr(float(first))
        yield reader(value + "".join(units))
        first += step


def run_sweep(
    schemes: Sequence[str],
    axes: Mapping[str, Sequence[Any]],
    run: Callable[[str, Point], Row],
    on_progress: Callable[[Swept], None] = lambda swept: None,
) -> Swept:
    """Run each scheme at each point. `run(scheme, point)` gives a row.

    A point that a scheme cannot run is counted in `failed`. KeyboardInterrupt ends the sweep, which
    keeps its rows. Raises SimulationError if no point can run.
    """
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    swept = Swept(len(schemes) * len(points))
    try:
        for point, scheme in product(points, schemes):
            try:
                swept.rows.append(run(scheme, point))
            except TitanliteError as error:
                at = ", ".join(f"{name}={value}" for name, value in point.items())
                swept.first_failed.setdefault(str(error), f"{scheme} with {at}")
                swept.failed[str(error)] += 1
            on_progress(swept)
        swept.is_complete = True
    except KeyboardInterrupt:
        pass
    if not swept.rows and swept.failed:
        reason = swept.failed.most_common(1)[0][0]
        raise SimulationError(f"--sweep: none of {swept.failed.total():,} points can run: {reason}")
    return swept


def mark_fronts(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], memory: str) -> Fronts:
    """The Pareto fronts: of the bubble against `memory`, and of the makespan against the workers.

    Makespans are compared between points of the same job, which differ in PLAN_AXES at most.
    """
    jobs: dict[Hashable, list[int]] = {}
    for place, row in enumerate(rows):
        job = tuple(str(row[name]) for name in axes if name not in PLAN_AXES)
        jobs.setdefault(job, []).append(place)
    fast = [False] * len(rows)
    for places in jobs.values():
        pairs = [(rows[place]["workers"], rows[place]["makespan"]) for place in places]
        for place, is_best in zip(places, pareto_front(pairs), strict=True):
            fast[place] = is_best
    return Fronts(pareto_front([(row[memory], row["bubble"]) for row in rows]), fast)


def pareto_front(pairs: Sequence[tuple[float, float]]) -> list[bool]:
    """Which pairs no other pair beats: at most as large in both places, and smaller in one."""
    least: dict[float, float] = {}
    for x, y in pairs:
        least[x] = min(y, least.get(x, y))
    best, lowest = set(), float("inf")
    for x in sorted(least):
        if least[x] < lowest:
            lowest = least[x]
            best.add((x, lowest))
    return [pair in best for pair in pairs]

"""A sweep's progress bar, its table, CSV file and picture."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.observe.terminal import terminal_width
from titanlite.tools.options import counting_bar
from titanlite.tools.simulate.figures import Row, table_rows, write_csv
from titanlite.tools.simulate.quantity import Quantity, size_scale, time_scale
from titanlite.tools.simulate.sweep import Fronts, Point, Swept, mark_fronts, run_sweep
from titanlite.tools.tables import format_table

MOST_REASONS = 5


def run_with_progress(
    schemes: Sequence[str], axes: Mapping[str, Sequence[Any]], run: Callable[[str, Point], Row]
) -> Swept:
    """`run_sweep` with a bar on a terminal; Ctrl-C keeps what has run."""
    with counting_bar() as progress:
        task = progress.add_task("points; Ctrl-C keeps those that have run")

        def on_progress(swept: Swept) -> None:
            progress.update(task, completed=swept.num_done, total=swept.num_points)

        return run_sweep(schemes, axes, run, on_progress)


def show_sweep(swept: Swept, axes: Sequence[str]) -> str:
    """The table with the fronts marked, and below it what did not run."""
    fronts = _fronts(swept, axes)
    header, cells = table_rows(swept.rows)
    marks = [
        "*" * memory + "+" * workers
        for memory, workers in zip(fronts.memory, fronts.workers, strict=True)
    ]
    rows = [[*row, mark] for row, mark in zip(cells, marks, strict=True)]
    lines = [
        format_table(
            [*header, "best"], rows, left=("scheme", "best"), width=terminal_width(sys.stdout, 0)
        ),
        f"* no other point has a smaller bubble with as little memory ({_memory_of(swept)})",
        "+ no other point of the same job has a shorter makespan with as few workers",
    ]
    if not swept.is_complete:
        lines.append(f"interrupted: {swept.num_done:,} of {swept.num_points:,} points have run")
    for reason, count in swept.failed.most_common(MOST_REASONS):
        first = swept.first_failed[reason]
        which = (
            f"{first} cannot run" if count == 1 else f"{count:,} points cannot run, {first} first"
        )
        lines.append(f"{which}: {reason}")
    if len(swept.failed) > MOST_REASONS:
        rest = swept.failed.total() - sum(n for _, n in swept.failed.most_common(MOST_REASONS))
        lines.append(f"{rest:,} points cannot run for other reasons")
    return "\n".join(lines)


def csv_of_sweep(swept: Swept, axes: Sequence[str]) -> str:
    """The rows as CSV, with 1 or 0 for each front."""
    fronts = _fronts(swept, axes)
    return write_csv(
        [
            {**row.values, "on memory front": int(memory), "on workers front": int(workers)}
            for row, memory, workers in zip(swept.rows, fronts.memory, fronts.workers, strict=True)
        ]
    )


def _memory_of(swept: Swept) -> str:
    """The column that says how much memory a point takes: of the sizes, if there are any."""
    has_sizes = all("peak memory" in row.values for row in swept.rows)
    return "peak memory" if has_sizes else "peak held"


def _fronts(swept: Swept, axes: Sequence[str]) -> Fronts:
    return mark_fronts([row.values for row in swept.rows], axes, _memory_of(swept))


def draw_sweep(swept: Swept, axes: Sequence[str], title: str, path: Path) -> None:
    """Write the picture of a sweep."""
    from titanlite.tools.figures.sweep import SweptPoint, save_sweep

    fronts, memory = _fronts(swept, axes), _memory_of(swept)
    rows, costs = [row.values for row in swept.rows], swept.rows[0].costs
    varied = [name for name in axes if len({row[name] for row in rows}) > 1]
    # If all points have as many workers, their makespan is drawn against another number.
    numbers = [name for name in varied if isinstance(rows[0][name], int | float | Quantity)]
    along = "workers" if "workers" in varied or not numbers else numbers[0]
    time_unit, time = time_scale(max(row["makespan"] for row in rows), costs.time_unit)
    size_unit, size = "", 1.0
    if memory == "peak memory":
        size_unit, size = size_scale(max(row[memory] for row in rows), costs.size_unit)
    points = [
        SweptPoint(
            row["scheme"],
            _named(row, [name for name in varied if name != along]),
            _named(row, varied),
            float(row[along]),
            float(row["makespan"]) * time,
            float(row[memory]) * size,
            float(row["bubble"]),
            on_memory,
            on_workers,
        )
        for row, on_memory, on_workers in zip(rows, fronts.memory, fronts.workers, strict=True)
    ]
    of_a_rank = "stage inputs held at once, per rank"
    if memory == "peak memory":
        of_a_rank = f"peak memory per rank{size_unit and f', {size_unit}'}"
    save_sweep(
        path,
        points,
        title=title,
        x_label=along.replace("_", " "),
        memory_label=of_a_rank,
        time_label=f"makespan, {time_unit}",
    )


def _named(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in axes)

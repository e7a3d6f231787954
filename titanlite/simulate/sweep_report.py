"""A sweep's progress bar, its table, CSV file and picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from titanlite.simulate.figures import table_rows, write_csv
from titanlite.simulate.sweep import Point, Swept, mark_fronts, run_sweep
from titanlite.simulate.table import format_table

MEMORY = "peak held"
MOST_REASONS = 5


def run_with_progress(
    schemes: Sequence[str],
    axes: Mapping[str, Sequence[Any]],
    run: Callable[[str, Point], dict[str, Any]],
) -> Swept:
    """`run_sweep` with a bar on a terminal; Ctrl-C keeps what has run."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("points; Ctrl-C keeps those that have run")

        def on_progress(swept: Swept) -> None:
            progress.update(task, completed=swept.num_done, total=swept.num_points)

        return run_sweep(schemes, axes, run, on_progress)


def show_sweep(swept: Swept, axes: Sequence[str]) -> str:
    """The table with the fronts marked, and below it what did not run."""
    fronts = mark_fronts(swept.rows, axes, MEMORY)
    header, cells = table_rows(swept.rows)
    marks = [
        "*" * memory + "+" * workers
        for memory, workers in zip(fronts.memory, fronts.workers, strict=True)
    ]
    rows = [[*row, mark] for row, mark in zip(cells, marks, strict=True)]
    lines = [
        format_table([*header, "best"], rows, left=("scheme", "best")),
        "* no other point has a smaller bubble with as few stage inputs held",
        "+ no other point of the same job has a shorter makespan with as few workers",
    ]
    if not swept.is_complete:
        lines.append(f"interrupted: {swept.num_done:,} of {swept.num_points:,} points have run")
    for reason, count in swept.failed.most_common(MOST_REASONS):
        first = swept.first_failed[reason]
        where = first if count == 1 else f"{count:,} points cannot run, {first} first"
        lines.append(f"{where}: {reason}" if count > 1 else f"{where} cannot run: {reason}")
    if len(swept.failed) > MOST_REASONS:
        rest = swept.failed.total() - sum(n for _, n in swept.failed.most_common(MOST_REASONS))
        lines.append(f"{rest:,} points cannot run for other reasons")
    return "\n".join(lines)


def csv_of_sweep(swept: Swept, axes: Sequence[str]) -> str:
    """The rows as CSV, with 1 or 0 for each front."""
    fronts = mark_fronts(swept.rows, axes, MEMORY)
    return write_csv(
        [
            {**row, "on memory front": int(memory), "on workers front": int(workers)}
            for row, memory, workers in zip(swept.rows, fronts.memory, fronts.workers, strict=True)
        ]
    )


def draw_sweep(swept: Swept, axes: Sequence[str], title: str, path: Path) -> None:
    """Write the picture of a sweep."""
    from titanlite.drawing.sweep import SweptPoint, save_sweep

    fronts = mark_fronts(swept.rows, axes, MEMORY)
    varied = [name for name in axes if len({row[name] for row in swept.rows}) > 1]
    points = [
        SweptPoint(
            row["scheme"],
            _named(row, [name for name in varied if name != "workers"]),
            _named(row, varied),
            row["workers"],
            float(row["makespan"]),
            float(row[MEMORY]),
            float(row["bubble"]),
            memory,
            workers,
        )
        for row, memory, workers in zip(swept.rows, fronts.memory, fronts.workers, strict=True)
    ]
    save_sweep(path, points, title=title, memory_label="stage inputs held at most by a worker")


def _named(row: Mapping[str, Any], axes: Sequence[str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {row[name]}" for name in axes)

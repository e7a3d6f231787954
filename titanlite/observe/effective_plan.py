"""The effective plan: what was asked for, what is active, and why not where they differ."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from titanlite.observe.terminal import is_terminal, terminal_width
from titanlite.plan_row import PlanRow

_HEADINGS = ("feature", "requested", "active", "note")


def render_plan(
    rows: Iterable[PlanRow], *, stream: TextIO | None = None, color: bool = True
) -> str:
    """The rows as a table to print to `stream`: ruled and colored for a terminal, else plain text.

    Rows whose active value is not the requested one are marked with "!", in yellow on a terminal.
    The plain form is ASCII, with no control characters and no line wrapped.
    """
    rows = list(rows)
    if stream is not None and is_terminal(stream):
        return _ruled(rows, color=color, width=terminal_width(stream))
    return _plain(rows)


def _ruled(rows: list[PlanRow], *, color: bool, width: int) -> str:
    table = Table(title="effective plan", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("  feature", no_wrap=True)
    for heading in _HEADINGS[1:]:
        table.add_column(heading)
    for row in rows:
        mark = "! " if row.differs else "  "
        table.add_row(
            Text(mark + row.feature),
            Text(row.requested),
            Text(row.active),
            Text(row.note),
            style="yellow" if row.differs else None,
        )
    out = io.StringIO()
    Console(
        file=out,
        force_terminal=True,
        color_system="auto" if color else None,
        width=width,
    ).print(table)
    return out.getvalue().rstrip()


def _plain(rows: list[PlanRow]) -> str:
    cells: list[Sequence[str]] = [_HEADINGS]
    cells += [(row.feature, row.requested, row.active, row.note) for row in rows]
    marks = [" "] + ["!" if row.differs else " " for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(3)] + [0]
    return "\n".join(
        f"{mark} " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for mark, line in zip(marks, cells, strict=True)
    )

"""The first screen of a run, printed before the first step.

    facts          one line each: device, model, data, batch, steps, output
    plan           each parallel feature as requested and as active
    mesh           the position of each rank

A run prints it in brief, unless metrics.verbose is set, and writes all of it to a file. The input
is plain values; run_facts.py derives the facts from a job.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from rich.console import Console
from rich.text import Text

from titanlite.observe.terminal import is_terminal, terminal_width
from titanlite.plan_row import PlanRow

PLAIN_WIDTH = 80
# The facts of the brief screen; those that differ from the request are there in any case.
IN_BRIEF = ("device", "model", "data", "batch", "steps", "output", "starts from")
_HEADINGS = ("feature", "requested", "active", "note")
_BETWEEN = "  "
_MARK = ("  ", "! ")  # of a row as it was asked for, and of one that differs
_LEAST_NOTE = 24


@dataclass(frozen=True)
class Fact:
    """One line about the run; `differs` if it is not what the job requests."""

    name: str
    text: str
    differs: bool = False


@dataclass(frozen=True)
class _Line:
    """A line of text; its first `num_bold` characters are shown in bold."""

    text: str
    num_bold: int = 0
    is_marked: bool = False


def render_screen(
    title: str,
    facts: Sequence[Fact],
    rows: Sequence[PlanRow],
    mesh: str,
    *,
    stream: TextIO | None = None,
    color: bool = True,
) -> str:
    """The screen as text to print to `stream`: colored for a terminal, otherwise plain ASCII.

    It is as wide as the terminal, or 80 columns if `stream` is no terminal.
    Longer texts are wrapped and indented. Lines that differ from the request are marked "!", on a
    terminal in yellow. `mesh` is the result of draw_mesh.
    """
    terminal = stream if stream is not None and is_terminal(stream) else None
    width = PLAIN_WIDTH if terminal is None else terminal_width(terminal)
    lines = [_Line(line, len(line)) for line in textwrap.wrap(title, width)]
    lines += [_Line(""), *_fact_lines(facts, width)]
    if rows:
        lines += [_Line(""), *_plan_lines(rows, width)]
    lines += [_Line(""), *map(_Line, beside(mesh, width))]
    if terminal is not None:
        return _colored(lines, color=color, width=width)
    return "\n".join(line.text.rstrip() for line in lines)


def in_brief(
    title: str, facts: Sequence[Fact], rows: Sequence[PlanRow], mesh: str
) -> tuple[str, list[Fact], list[PlanRow], str]:
    """The content of a screen that names the active features in one line, and the mesh."""
    on = [f"{row.feature} {row.active}" for row in rows if row.active != "off" and not row.differs]
    shown = [fact for fact in facts if fact.differs or fact.name in IN_BRIEF]
    rest = "; first_screen.txt there has the rest"
    shown = [replace(one, text=one.text + rest * (one.name == "output")) for one in shown]
    shown += [Fact("plan", ", ".join(on))] if on else []
    return title, shown, [row for row in rows if row.differs], mesh.partition("\n")[0]


def beside(mesh: str, width: int) -> list[str]:
    """The lines of a mesh drawing, with the groups to the right of the grid if there is room.

    `mesh` has a title, a grid and a list of groups, separated by empty lines.
    """
    title, *blocks = mesh.split("\n\n")
    if not blocks:
        return [title]
    grid = blocks[0].splitlines()
    groups = [line for block in blocks[1:] for line in block.splitlines()]
    left = max(map(len, grid)) + 4
    fits = len(groups) <= len(grid) and left + max(map(len, groups), default=0) <= width
    if not fits:
        return [title, *grid, *groups]
    groups += [""] * (len(grid) - len(groups))
    both = (f"{line:<{left}}{group}".rstrip() for line, group in zip(grid, groups, strict=True))
    return [title, *both]


def _fact_lines(facts: Iterable[Fact], width: int) -> list[_Line]:
    facts = list(facts)
    indent = 2 + max(len(fact.name) for fact in facts) + len(_BETWEEN)
    lines = []
    for fact in facts:
        head = f"{_MARK[fact.differs]}{fact.name}".ljust(indent)
        lines += _hanging(head, fact.text, width, fact.differs)
    return lines


def _plan_lines(rows: Sequence[PlanRow], width: int) -> list[_Line]:
    """One row per feature that is on or requested; the last row lists those that are off."""
    shown = [row for row in rows if row.differs or row.active != "off"]
    off = [row.feature for row in rows if row not in shown]
    cells = [(row.feature, row.requested, row.active) for row in shown]
    widths = [max(map(len, column)) for column in zip(_HEADINGS[:3], *cells, strict=True)]
    head = "  " + _BETWEEN.join(map(str.ljust, _HEADINGS, widths)) + _BETWEEN + _HEADINGS[3]
    lines = [_Line(head, len(head))] if shown else []
    for row, of_row in zip(shown, cells, strict=True):
        head = _MARK[row.differs] + _BETWEEN.join(map(str.ljust, of_row, widths)) + _BETWEEN
        lines += _hanging(head, row.note, width, row.differs, len(row.feature) + 2)
    if off:
        head = f"  {'off':<{widths[0]}}{_BETWEEN}"
        lines += _hanging(head, ", ".join(off), width, False)
    return lines


def _hanging(
    head: str, text: str, width: int, is_marked: bool, num_bold: int | None = None
) -> list[_Line]:
    """`head` and `text`, wrapped with a hanging indent that leaves room for a word."""
    indent = len(head) if width - len(head) >= _LEAST_NOTE else 4
    wrapped = textwrap.wrap(
        head + text,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [head]
    first, *others = wrapped
    bold = len(head) if num_bold is None else num_bold
    return [_Line(first, bold, is_marked), *(_Line(line, 0, is_marked) for line in others)]


def _colored(lines: Iterable[_Line], *, color: bool, width: int) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=True,
        color_system="auto" if color else None,
        width=width,
        highlight=False,
        emoji=False,
        markup=False,
    )
    for line in lines:
        text = Text(line.text.rstrip(), style="yellow" if line.is_marked else "")
        text.stylize("bold", 0, line.num_bold)
        console.print(text, soft_wrap=True)
    return out.getvalue().rstrip()

"""A timeline as text for a terminal: one row per rank, in colour if supported."""

from __future__ import annotations

import shutil
import sys
import textwrap
from bisect import bisect_right
from itertools import groupby

from titanlite.observe.terminal import terminal_width
from titanlite.schedule.walk import WORK, Span
from titanlite.tools.figures import palette
from titanlite.tools.figures.palette import uses_color
from titanlite.tools.figures.timeline import Timeline


def draw_text(timeline: Timeline, width: int | None = None, color: bool | None = None) -> str:
    """`timeline` in lines of at most `width` characters (default: the terminal's).

    If cells start and end on whole steps and the labels fit, a cell shows `timeline.label`; after a
    stage, without colour, a dot and the microbatch. Otherwise each character shows what runs in the
    middle of its share of the time. The end of each row shows its idle fraction. Below
    a row are its weight fetches and its gradient reductions, if it has any.
    """
    if color is None:
        color = uses_color(sys.stdout)
    width = width or shutil.get_terminal_size().columns
    beside = _beside(timeline)
    names = [*timeline.rows, *(name for name, _ in _BESIDE.values() if beside)]
    margin = max(map(len, names), default=0) + 1
    room = max(20, width - margin - len(" 100%"))
    rows: list[list[Span]] = [[] for _ in timeline.rows]
    for span in sorted(timeline.spans, key=lambda span: span.start):
        if span.kind in WORK or span.kind == "SEND":
            rows[span.row].append(span)
    labels, used = _choose_labels(timeline, [span for row in rows for span in row], room, color)

    room_above = max(width, terminal_width(sys.stdout))
    lines = [timeline.title, *textwrap.wrap(timeline.caption, room_above)]
    names_and_rows = zip(timeline.rows, rows, timeline.bubbles(), strict=True)
    for number, (name, row, bubble) in enumerate(names_and_rows):
        if labels:
            drawn = _labelled(timeline, row, labels, used, color)
        else:
            drawn = _sampled(timeline, row, used, color)
        lines.append(f"{name:>{margin - 1}} {drawn} {bubble:4.0%}")
        for kind, (what, _) in _BESIDE.items():
            if moved := beside.get((number, kind)):
                drawn = _strip(timeline, moved, used, color)
                lines.append(f"{what:>{margin - 1}} {drawn}".rstrip())
    end = f"{timeline.drawn_end - timeline.start:g} {timeline.unit}"
    lines.append(" " * margin + "0" + end.rjust(used - 1) + " idle")
    return "\n".join(lines)


# What runs beside the work of its row: the name of its line, and its character without colour.
_BESIDE = {"FETCH": ("fetch", "<"), "REDUCE_GRAD": ("reduce", "+")}


def _beside(timeline: Timeline) -> dict[tuple[int, str], list[Span]]:
    """The spans of the kinds in _BESIDE, by row and kind."""
    found: dict[tuple[int, str], list[Span]] = {}
    for span in timeline.spans:
        if span.kind in _BESIDE:
            found.setdefault((span.row, span.kind), []).append(span)
    return found


def _strip(timeline: Timeline, spans: list[Span], room: int, color: bool) -> str:
    """A line in which each span covers its share of the time, at least one character."""
    scale = room / (timeline.drawn_end - timeline.start)
    covered = [False] * room
    for span in spans:
        start = min(round((span.start - timeline.start) * scale), room - 1)
        end = max(start + 1, round((span.end - timeline.start) * scale))
        covered[start:end] = [True] * (end - start)
    text = ""
    for is_covered, places in groupby(covered):
        length = len(list(places))
        if not is_covered:
            text += " " * length
        elif color:
            text += _paint(timeline, spans[0], " " * length)
        else:
            text += _BESIDE[spans[0].kind][1] * length
    return text


def _choose_labels(
    timeline: Timeline, spans: list[Span], room: int, color: bool
) -> tuple[dict[Span, str], int]:
    """The longest labels that fit into `room`, and the width they take; empty if none fit."""
    step = min((span.end - span.start for span in spans), default=0)
    times = [time / step for span in spans for time in (span.start, span.end)] if step else []
    if not times or any(abs(time - round(time)) >= 1e-6 for time in times):
        return {}, room
    steps = round((timeline.drawn_end - timeline.start) / step)
    if timeline.start or steps > room:
        return {}, room
    short = {span: timeline.label(span) or "-" for span in spans}
    full = {span: f"{label}.{span.microbatch} " for span, label in short.items()}
    for labels in (short,) if color or timeline.cells_show == "batch" else (full, short):
        tightest = max(
            -(-len(text) // round((s.end - s.start) / step)) for s, text in labels.items()
        )
        if tightest * steps <= room:
            return labels, tightest * steps
    return {}, steps * (room // steps)


def _labelled(
    timeline: Timeline, row: list[Span], labels: dict[Span, str], room: int, color: bool
) -> str:
    scale = room / timeline.drawn_end
    text, at = "", 0
    for span in row:
        text += "." * (round(span.start * scale) - at)
        at = round(span.end * scale)
        length = at - round(span.start * scale)
        if color:
            text += _paint(timeline, span, labels[span].ljust(length))
        else:
            label = labels[span].rstrip()
            gap = len(labels[span]) - len(label)
            text += label.ljust(length - gap, "-") + " " * gap
    return text + "." * (room - at)


def _sampled(timeline: Timeline, row: list[Span], room: int, color: bool) -> str:
    starts = [span.start for span in row]
    text = ""
    for i in range(room):
        time = timeline.start + (timeline.drawn_end - timeline.start) * (i + 0.5) / room
        at = bisect_right(starts, time) - 1
        if at < 0 or row[at].end <= time:
            text += "."
            continue
        letter = timeline.letters.get(row[at].kind, "-")
        text += _paint(timeline, row[at], letter) if color else letter
    return text


def _paint(timeline: Timeline, span: Span, text: str) -> str:
    back = palette.fill(span.kind, span.microbatch, timeline.num_microbatches)
    return f"\033[38;2;{_rgb(palette.ON_CELL)};48;2;{_rgb(back)}m{text}\033[0m"


def _rgb(color: str) -> str:
    return ";".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))

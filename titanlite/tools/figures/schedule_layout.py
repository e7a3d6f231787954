"""The layout of a timeline's picture: boxes, texts and lines in pixels, for every format.

schedule_svg.py and schedule_png.py draw what `marks` yields; a page looks up `cells`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from titanlite.schedule.timeline import NAMES, WORK, Span, Timeline
from titanlite.tools.figures import palette

_CURVES_HEIGHT = 90
_KEY_STEP = 34
_BESIDE = ("FETCH", "REDUCE_GRAD")  # they run beside the work of their row


class Box(NamedTuple):
    """A filled rectangle; `x` and `y` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: str


class SpanBox(NamedTuple):
    """The box of a span."""

    span: Span
    box: Box


class Text(NamedTuple):
    """A line of text on the baseline `y`; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float
    color: str = "#1c1c1c"
    anchor: str = "start"
    weight: str = "normal"


class Line(NamedTuple):
    """A line through `points`, with the name of what it shows, if it is a curve."""

    points: Sequence[tuple[float, float]]
    color: str
    width: float = 1.0
    name: str = ""


class Label(NamedTuple):
    """The text of a cell, to be centred on (x, y) if it fits into `width` x `height`."""

    x: float
    y: float
    text: str
    color: str
    width: float
    height: float


Mark: TypeAlias = "Box | SpanBox | Text | Line | Label"


@dataclass(frozen=True)
class Canvas:
    """The layout of a picture in pixels; `x(time)` and `y(row)` are upper left corners."""

    timeline: Timeline
    left: float
    top: float
    row_height: float
    scale: float
    work_height: float  # of the part of a row in which work is drawn
    lane_height: float = 0

    @classmethod
    def of(cls, timeline: Timeline) -> Canvas:
        rows = len(timeline.rows)
        work_height = 24.0 if rows <= 12 else 18.0 if rows <= 24 else 12.0 if rows <= 48 else 9.0
        # Below the work there is a lane per kind of communication, then a gap to the next row.
        lane_height = work_height / 6 if timeline.lanes else 0.0
        row_height = work_height + lane_height * (len(timeline.lanes) + 1.5 * bool(timeline.lanes))
        left = 14 + 6.2 * max((len(row) for row in timeline.rows), default=0)
        duration = timeline.drawn_end - timeline.start or 1
        longest = max((len(timeline.label(span)) for span in timeline.spans[:1000]), default=2)
        shortest = min((s.end - s.start for s in timeline.spans if s.kind in WORK), default=1)
        # Wide enough for the labels if that stays below 1,500 pixels, and never less than 700.
        wanted = (8 * longest + 6) / shortest * duration if shortest else 1500
        scale = min(1500, max(700, wanted)) / duration
        return cls(timeline, left, 64, row_height, scale, work_height, lane_height)

    @cached_property
    def strips(self) -> list[str]:
        """The kinds that have a strip at the bottom of the work, upper ones first."""
        found = {span.kind for span in self.timeline.spans}
        return [kind for kind in _BESIDE if kind in found]

    @property
    def strip_height(self) -> float:
        """The height of a strip; work without other kinds has one of its own size."""
        return (0.28 if len(self.strips) < 2 else 0.2) * self.work_height

    def x(self, time: float) -> float:
        return self.left + (time - self.timeline.start) * self.scale

    def y(self, row: int) -> float:
        return self.top + row * self.row_height

    @property
    def right(self) -> float:
        return self.x(self.timeline.drawn_end)

    @property
    def bottom(self) -> float:
        return self.y(len(self.timeline.rows))

    @property
    def width(self) -> float:
        names = [name for _, name in shown_curves(self.timeline)]
        legend = self.left + sum(_legend_step(kind) for kind in _kinds(self.timeline))
        legend += 6.2 * len(self.timeline.batches_are) + 12 + 160 + 30
        key = self.left + 6.2 * len(self.timeline.curves_label) + 16
        key += sum(_KEY_STEP + 6.2 * len(name) for name in names)
        title = 20 + 8.7 * len(self.timeline.title)
        caption = 20 + 6.2 * len(self.timeline.caption)
        return max(self.right + 46, 820, legend, key, title, caption)

    @property
    def height(self) -> float:
        return self.bottom + 34 + (_CURVES_HEIGHT + 46 if self.timeline.curves else 0)


def canvases_of(timelines: Sequence[Timeline]) -> list[Canvas]:
    """One canvas per timeline, all with the same scale and time axis, for comparison."""
    until = max(timeline.drawn_end for timeline in timelines)
    canvases = [Canvas.of(replace(timeline, until=until)) for timeline in timelines]
    scale, left = max(o.scale for o in canvases), max(o.left for o in canvases)
    return [replace(o, scale=scale, left=left) for o in canvases]


def marks(canvas: Canvas) -> Iterator[Mark]:
    """All of a picture, from back to front."""
    timeline = canvas.timeline
    yield Box(0, 0, canvas.width, canvas.height, "#ffffff")
    yield Text(10, 20, timeline.title, 14, weight="bold")
    yield Text(10, 38, timeline.caption, 11, "#444444")
    yield from _legend(canvas)
    yield from _frame(canvas)
    yield from cells(canvas)
    yield from _labels(canvas)
    yield from _time_axis(canvas)
    yield from _curves(canvas)


def cells(canvas: Canvas) -> Iterator[SpanBox]:
    """The box of each span, in the order of drawing: a later one is in front."""
    timeline, lanes = canvas.timeline, canvas.timeline.lanes
    gap = 0.6 if canvas.work_height >= 12 else 0.3
    strip = canvas.strip_height
    count = timeline.num_microbatches
    for span in timeline.spans:
        x, width = canvas.x(span.start), (span.end - span.start) * canvas.scale
        y, height = canvas.y(span.row) + gap, canvas.work_height - 2 * gap
        if span.kind in lanes:
            height = canvas.lane_height
            y = canvas.y(span.row) + canvas.work_height + lanes.index(span.kind) * height
            height, width = height - 0.5, max(2.5, width)
        elif span.kind not in WORK and span.kind != "SEND":
            # Fetches and reductions run beside the work: a strip each at the bottom of the row.
            above = canvas.strips[::-1].index(span.kind) if span.kind in canvas.strips else 0
            y, height = y + height - (above + 1) * strip, strip
        width = max(0.4, width - min(0.6, 0.15 * width))
        fill = palette.fill(span.kind, span.microbatch, count)
        yield SpanBox(span, Box(x, y, width, height, fill))


def _labels(canvas: Canvas) -> Iterator[Label]:
    timeline = canvas.timeline
    height = canvas.work_height - len(canvas.strips) * canvas.strip_height
    for span in timeline.spans:
        text = timeline.label(span) if span.kind in WORK else ""
        if text:
            width = (span.end - span.start) * canvas.scale
            x, y = canvas.x(span.start) + width / 2, canvas.y(span.row) + height / 2
            yield Label(x, y, text, palette.ink(span.kind), width, height)


def _frame(canvas: Canvas) -> Iterator[Mark]:
    rows = canvas.timeline.rows
    every = 1 if canvas.row_height >= 12 else 4
    width, height = canvas.right - canvas.left, canvas.bottom - canvas.top
    yield Box(canvas.left, canvas.top, width, height, "#f1f1f1")
    bubbles = canvas.timeline.bubbles()
    yield Text(canvas.right + 40, canvas.top - 6, "idle", 10, "#777777", "end")
    for row, name in enumerate(rows):
        if row % every == 0:
            y = canvas.y(row) + canvas.work_height / 2 + 3.5
            yield Text(canvas.left - 6, y, name, 10, anchor="end")
            yield Text(canvas.right + 40, y, f"{bubbles[row]:.0%}", 10, "#777777", "end")


def _time_axis(canvas: Canvas) -> Iterator[Mark]:
    timeline, y = canvas.timeline, canvas.bottom
    for tick in _ticks(timeline.drawn_end - timeline.start):
        x = canvas.x(timeline.start + tick)
        yield Line([(x, y), (x, y + 4)], "#999999")
        yield Text(x, y + 15, f"{tick:g}", 10, "#555555", "middle")
    yield Text(canvas.left - 6, y + 15, timeline.unit, 10, "#555555", "end")


def _legend(canvas: Canvas) -> Iterator[Mark]:
    timeline = canvas.timeline
    x = canvas.left
    for kind in _kinds(timeline):
        yield Box(round(x), 48, 10, 10, palette.fill(kind, 0, timeline.num_microbatches))
        yield Text(x + 14, 57, NAMES[kind], 10, "#444444")
        x += _legend_step(kind)
    count = timeline.num_microbatches
    each = min(12, 160 / count)
    yield Text(x, 57, f"{timeline.batches_are} 0", 10, "#444444")
    x += 6.2 * len(timeline.batches_are) + 12
    for microbatch in range(count):
        yield Box(x + microbatch * each, 48, each, 10, palette.fill("F", microbatch, count))
    yield Text(x + count * each + 4, 57, f"{count - 1}", 10, "#444444")


def _curves(canvas: Canvas) -> Iterator[Mark]:
    timeline = canvas.timeline
    if not timeline.curves:
        return
    top, height = canvas.bottom + 46, _CURVES_HEIGHT
    most = max((value for curve in timeline.curves.values() for _, value in curve), default=0) or 1
    yield Text(canvas.left, top - 8, timeline.curves_label, 10, "#444444")
    # The values are counts, so ticks are whole numbers.
    for tick in (tick for tick in _ticks(most, 4) if tick == round(tick)):
        y = top + height * (1 - tick / most)
        yield Line([(canvas.left, y), (canvas.right, y)], "#e4e4e4")
        yield Text(canvas.left - 6, y + 3.5, f"{tick:g}", 10, "#555555", "end")
    for row, (name, curve) in enumerate(timeline.curves.items()):
        points: list[tuple[float, float]] = []
        for time, value in curve:
            x, y = canvas.x(time), top + height * (1 - value / most)
            points += [(x, points[-1][1]), (x, y)] if points else [(x, y)]
        if points:
            points.append((canvas.right, points[-1][1]))
            yield Line(points, palette.line(row, len(timeline.curves)), 1.3, name)
    # The key: the colour of each row's curve.
    x = canvas.left + 6.2 * len(timeline.curves_label) + 16
    for row, name in shown_curves(timeline):
        y = top - 11.5
        yield Line([(x, y), (x + 14, y)], palette.line(row, len(timeline.curves)), 2.5)
        yield Text(x + 18, top - 8, name, 10, "#444444")
        x += _KEY_STEP + 6.2 * len(name)


def _kinds(timeline: Timeline) -> list[str]:
    """The kinds in the legend, in its order."""
    kinds = {span.kind for span in timeline.spans}
    return [kind for kind in NAMES if kind in kinds]


def _legend_step(kind: str) -> float:
    return 32 + 6.0 * len(NAMES[kind])


def shown_curves(timeline: Timeline) -> list[tuple[int, str]]:
    """The index and name of each curve in the key: all, or of more than 8 the first and last."""
    names = list(enumerate(timeline.curves))
    return names if len(names) <= 8 else [names[0], names[-1]]


def _ticks(length: float, about: int = 12) -> list[float]:
    """About `about` round numbers from 0 up to `length`."""
    if length <= 0:
        return [0]
    power = 10.0 ** math.floor(math.log10(length / about))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * about >= length)
    return [i * step for i in range(int(length / step + 1e-9) + 1)]

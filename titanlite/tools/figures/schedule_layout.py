"""The layout of a timeline's picture: boxes, texts and lines in pixels, for every format.

schedule_svg.py and schedule_png.py draw what `marks` yields; a page looks up `cells`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

from titanlite.schedule.walk import WORK, Span
from titanlite.tools.figures import palette
from titanlite.tools.figures.canvas import RANKS
from titanlite.tools.figures.timeline import NAMES, Timeline

WIDTH = 850.0  # of a picture for a page of text, whose texts are read at this width
_CURVES_HEIGHT = 90
_LETTER = 6.5  # the mean width of a letter of a text of 11 pixels
_LINE = 17.0
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
    color: str = palette.INK
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
    row_height: float
    scale: float
    work_height: float  # of the part of a row in which work is drawn
    lane_height: float = 0
    legend: Mapping[str, str] = field(default_factory=dict)  # colours, by what they mean

    @classmethod
    def of(cls, timeline: Timeline, width: float = 0) -> Canvas:
        """With a `width` in pixels, or as wide as the texts of the cells need."""
        rows = len(timeline.rows)
        work_height = 24.0 if rows <= 12 else 16.0 if rows <= 24 else 12.0 if rows <= 48 else 9.0
        # Below the work there is a lane per kind of communication, then a gap to the next row.
        lane_height = work_height / 6 if timeline.lanes else 0.0
        row_height = work_height + lane_height * (len(timeline.lanes) + 1.5 * bool(timeline.lanes))
        left = 14 + _LETTER * max((len(row) for row in timeline.rows), default=0)
        duration = timeline.drawn_end - timeline.start or 1
        longest = max((len(timeline.cell(span)) for span in timeline.spans[:1000]), default=2)
        shortest = min((s.end - s.start for s in timeline.spans if s.kind in WORK), default=1)
        # Wide enough for the texts if that stays below 1,500 pixels, and never less than 700.
        wanted = (8 * longest + 6) / shortest * duration if shortest else 1500
        plot = width - left - 50 if width else min(1500, max(700, wanted))
        lengths = plot / duration, work_height, lane_height
        return cls(timeline, left, row_height, *lengths, legend=_legend([timeline]))

    @cached_property
    def strips(self) -> list[str]:
        """The kinds that have a strip at the bottom of the work, upper ones first."""
        found = {span.kind for span in self.timeline.spans}
        return [kind for kind in _BESIDE if kind in found]

    @property
    def strip_height(self) -> float:
        """The height of a strip; work without other kinds has one of its own size."""
        return (0.28 if len(self.strips) < 2 else 0.2) * self.work_height

    @cached_property
    def header(self) -> list[Mark]:
        """The title, the caption and the legend, in as many lines as they need."""
        timeline, y, found = self.timeline, 20.0, list[Mark]()
        for words in textwrap.wrap(timeline.title, int((self.width - 20) / 9.2)):
            found.append(Text(10, y, words, 14, weight="bold"))
            y += 18
        for words in textwrap.wrap(timeline.caption, int((self.width - 20) / _LETTER)):
            found.append(Text(10, y, words, 11, palette.QUIET))
            y += _LINE
        legend = self.legend
        places = _flow([(text, 18.0) for text in legend], self.left, self.width - 60)
        for (text, fill), (x, line) in zip(legend.items(), places, strict=True):
            if fill:
                found.append(Box(x, y + line * _LINE - 9, 11, 11, fill))
            found.append(Text(x + 15 * bool(fill), y + line * _LINE, text, 11, palette.QUIET))
        return found

    @cached_property
    def top(self) -> float:
        return 10 + max(mark.y for mark in self.header if isinstance(mark, Text | Box))

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
        return max(self.right + 50, WIDTH)

    @property
    def height(self) -> float:
        curves = _CURVES_HEIGHT + 26 + _LINE * len({line for _, line in _key(self)})
        return self.bottom + 30 + (curves if self.timeline.curves else 0)


def canvases_of(timelines: Sequence[Timeline], width: float = 0) -> list[Canvas]:
    """One canvas per timeline, all with the same scale and time axis, for comparison.

    Those of a `width` have the legend once, and no curves if there are several.
    """
    until = max(timeline.drawn_end for timeline in timelines)
    if width and len(timelines) > 1:
        timelines = [replace(timeline, curves={}) for timeline in timelines]
    canvases = [Canvas.of(replace(timeline, until=until), width) for timeline in timelines]
    scales, left = [one.scale for one in canvases], max(one.left for one in canvases)
    canvases = [
        replace(one, scale=min(scales) if width else max(scales), left=left) for one in canvases
    ]
    if width and len(canvases) > 1:
        canvases = [replace(one, legend={}) for one in canvases]
        canvases[0] = replace(canvases[0], legend=_legend(timelines))
    return canvases


def marks(canvas: Canvas) -> Iterator[Mark]:
    """All of a picture, from back to front."""
    yield Box(0, 0, canvas.width, canvas.height, palette.PAPER)
    yield from canvas.header
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
        yield SpanBox(span, Box(x, y, width, height, _fill(timeline, span)))


def _fill(timeline: Timeline, span: Span) -> str:
    if timeline.is_by_stage or span.kind not in palette.PHASES:
        return palette.fill(span.kind, span.microbatch, timeline.num_microbatches)
    return palette.PHASES[span.kind][timeline.chunks.get((span.row, span.stage), 0) % 2]


def _labels(canvas: Canvas) -> Iterator[Label]:
    timeline = canvas.timeline
    height = canvas.work_height - len(canvas.strips) * canvas.strip_height
    for span in timeline.spans:
        text = timeline.cell(span) if span.kind in WORK else ""
        if text:
            width = (span.end - span.start) * canvas.scale
            x, y = canvas.x(span.start) + width / 2, canvas.y(span.row) + height / 2
            yield Label(x, y, text, palette.ON_CELL, width, height)


def _frame(canvas: Canvas) -> Iterator[Mark]:
    rows = canvas.timeline.rows
    every = 1 if canvas.row_height >= 12 else 4
    width, height = canvas.right - canvas.left, canvas.bottom - canvas.top
    yield Box(canvas.left, canvas.top, width, height, palette.IDLE)
    bubbles = canvas.timeline.bubbles()
    yield Text(canvas.right + 42, canvas.top - 6, "idle", 11, palette.QUIET, "end")
    for row, name in enumerate(rows):
        if row % every == 0:
            y = canvas.y(row) + canvas.work_height / 2 + 4
            yield Text(canvas.left - 6, y, name, 11, anchor="end")
            yield Text(canvas.right + 42, y, f"{bubbles[row]:.0%}", 11, palette.QUIET, "end")


def _time_axis(canvas: Canvas) -> Iterator[Mark]:
    timeline, y = canvas.timeline, canvas.bottom
    length, unit, size = timeline.drawn_end - timeline.start, timeline.unit, 1.0
    if unit == "ms" and length >= 1000:
        length, unit, size = length / 1000, "s", 1000.0
    for tick in _ticks(length):
        x = canvas.x(timeline.start + size * tick)
        yield Line([(x, y), (x, y + 4)], palette.QUIET)
        yield Text(x, y + 16, f"{tick:g}", 11, palette.QUIET, "middle")
    yield Text(canvas.left - 10, y + 16, unit, 11, palette.QUIET, "end")


def _legend(timelines: Sequence[Timeline]) -> dict[str, str]:
    first = timelines[0]
    kinds = {span.kind for timeline in timelines for span in timeline.spans}
    if {"B", "I"} <= kinds:
        kinds.remove("I")  # of the same colour
    found = {NAMES[k]: _fill(first, Span(0, 0, 0, k, 0, 0)) for k in NAMES if k in kinds}
    text = f"number: {first.batches_are}"
    if first.is_by_stage:
        text = f"number: stage; colour: {first.batches_are}"
    elif any(place % 2 for timeline in timelines for place in timeline.chunks.values()):
        text += "; lighter: every second stage"
    return {**found, text: ""}


def _flow(items: Sequence[tuple[str, float]], left: float, right: float) -> list[tuple[float, int]]:
    """The x and the line of each (text, width of its sign), as words of a paragraph."""
    found, x, line = [], left, 0
    for text, sign in items:
        width = sign + _LETTER * len(text)
        if x > left and x + width > right:
            x, line = left, line + 1
        found.append((x, line))
        x += width + 14
    return found


def _key(canvas: Canvas) -> list[tuple[float, int]]:
    """Where the names of the curves are."""
    left = canvas.left + _LETTER * len(canvas.timeline.curves_label) + 14
    return _flow([(name, 22.0) for _, name in shown_curves(canvas.timeline)], left, canvas.width)


def _curves(canvas: Canvas) -> Iterator[Mark]:
    timeline = canvas.timeline
    if not timeline.curves:
        return
    height, key = _CURVES_HEIGHT, _key(canvas)
    top = canvas.height - height - 14
    above = canvas.bottom + 38
    most = max((value for curve in timeline.curves.values() for _, value in curve), default=0) or 1
    if timeline.curves_label:
        yield Text(canvas.left, above, timeline.curves_label, 11, palette.QUIET)
    # The values are counts, so ticks are whole numbers.
    for tick in (tick for tick in _ticks(most, 4) if tick == round(tick)):
        y = top + height * (1 - tick / most)
        yield Line([(canvas.left, y), (canvas.right, y)], palette.GRID)
        yield Text(canvas.left - 6, y + 4, f"{tick:g}", 11, palette.QUIET, "end")
    for row, (name, curve) in enumerate(timeline.curves.items()):
        points: list[tuple[float, float]] = []
        for time, value in curve:
            x, y = canvas.x(time), top + height * (1 - value / most)
            points += [(x, points[-1][1]), (x, y)] if points else [(x, y)]
        if points:
            points.append((canvas.right, points[-1][1]))
            yield Line(points, RANKS[row % len(RANKS)], 1.5, name)
    # The key: the colour of each row's curve.
    for (row, name), (x, line) in zip(shown_curves(timeline), key, strict=True):
        y = above + line * _LINE
        yield Line([(x, y - 4), (x + 14, y - 4)], RANKS[row % len(RANKS)], 2.5)
        yield Text(x + 18, y, name, 11, palette.QUIET)


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

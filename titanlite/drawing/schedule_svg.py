"""A timeline as SVG: one row per rank, time across, coloured by microbatch, curves below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from titanlite.drawing import palette
from titanlite.schedule.timeline import NAMES, WORK, Timeline

_FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
_CURVES_HEIGHT = 90
_KEY_STEP = 34
_MOST_CELLS_WITH_HOVER = 4000  # beyond that, cells of one colour are drawn as one path


@dataclass(frozen=True)
class Canvas:
    """The layout of a picture in pixels; `x(time)` and `y(row)` are upper left corners."""

    timeline: Timeline
    left: float
    top: float
    row_height: float
    scale: float
    with_hover: bool = True
    lane_height: float = 0

    @classmethod
    def of(cls, timeline: Timeline) -> Canvas:
        rows = len(timeline.rows)
        row_height = 24.0 if rows <= 12 else 18.0 if rows <= 24 else 12.0 if rows <= 48 else 9.0
        # Below the work there is a lane per kind of communication, then a gap to the next row.
        lane_height = row_height / 6 if timeline.lanes else 0.0
        row_height += lane_height * (len(timeline.lanes) + 1.5 * bool(timeline.lanes))
        left = 14 + 6.2 * max((len(row) for row in timeline.rows), default=0)
        duration = timeline.drawn_end - timeline.start or 1
        longest = max((len(timeline.label(span)) for span in timeline.spans[:1000]), default=2)
        shortest = min((s.end - s.start for s in timeline.spans if s.kind in WORK), default=1)
        # Wide enough for the labels if that stays below 1,500 pixels, and never less than 700.
        wanted = (8 * longest + 6) / shortest * duration if shortest else 1500
        scale = min(1500, max(700, wanted)) / duration
        return cls(timeline, left, 64, row_height, scale, lane_height=lane_height)

    @property
    def work_height(self) -> float:
        """The height of the part of a row in which work is drawn."""
        lanes = self.timeline.lanes
        return self.row_height - self.lane_height * (len(lanes) + 1.5 * bool(lanes))

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
        return max(self.right + 46, 820, legend, key)

    @property
    def height(self) -> float:
        return self.bottom + 34 + (_CURVES_HEIGHT + 46 if self.timeline.curves else 0)


def draw_svg(*timelines: Timeline) -> str:
    """One self-contained SVG element, with several timelines below each other.

    Cells have a hover text, unless there are more than 4,000.
    """
    canvases = canvases_of(timelines)
    pictures = [draw_canvas(canvas) for canvas in canvases]
    if len(pictures) == 1:
        return pictures[0]
    height = sum(canvas.height for canvas in canvases)
    y, parts = 0.0, [_opening(max(canvas.width for canvas in canvases), height)]
    for picture, canvas in zip(pictures, canvases, strict=True):
        parts.append(picture.replace("<svg ", f"<svg y='{y:.0f}' ", 1))
        y += canvas.height
    return "\n".join([*parts, "</svg>"])


def canvases_of(timelines: Sequence[Timeline]) -> list[Canvas]:
    """One canvas per timeline, all with the same scale and time axis, for comparison."""
    until = max(timeline.drawn_end for timeline in timelines)
    canvases = [Canvas.of(replace(timeline, until=until)) for timeline in timelines]
    scale, left = max(o.scale for o in canvases), max(o.left for o in canvases)
    hover = sum(len(timeline.spans) for timeline in timelines) <= _MOST_CELLS_WITH_HOVER
    return [replace(o, scale=scale, left=left, with_hover=hover) for o in canvases]


def draw_canvas(canvas: Canvas) -> str:
    """The SVG element of one timeline."""
    timeline = canvas.timeline
    parts = [
        _opening(canvas.width, canvas.height),
        "<rect width='100%' height='100%' fill='#ffffff'/>",
        _text(10, 20, timeline.title, 14, weight="bold"),
        _text(10, 38, timeline.caption, 11, "#444444"),
        *_legend(canvas),
        *_frame(canvas),
        *_cells(canvas),
        *_time_axis(canvas),
        *_curves(canvas),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part)


def _opening(width: float, height: float) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {_FONT}>"
    )


def _frame(canvas: Canvas) -> Iterator[str]:
    rows = canvas.timeline.rows
    every = 1 if canvas.row_height >= 12 else 4
    width = canvas.right - canvas.left
    yield (
        f"<rect x='{canvas.left:g}' y='{canvas.top:g}' width='{width:.2f}' "
        f"height='{canvas.bottom - canvas.top:g}' fill='#f1f1f1'/>"
    )
    bubbles = canvas.timeline.bubbles()
    yield _text(canvas.right + 40, canvas.top - 6, "idle", 10, "#777777", "end")
    for row, name in enumerate(rows):
        if row % every == 0:
            y = canvas.y(row) + canvas.work_height / 2 + 3.5
            yield _text(canvas.left - 6, y, name, 10, anchor="end")
            yield _text(canvas.right + 40, y, f"{bubbles[row]:.0%}", 10, "#777777", "end")


def _cells(canvas: Canvas) -> Iterator[str]:
    timeline = canvas.timeline
    gap = 0.6 if canvas.work_height >= 12 else 0.3
    paths: dict[str, list[str]] = {}
    for span in timeline.spans:
        x, width = canvas.x(span.start), (span.end - span.start) * canvas.scale
        y, height = canvas.y(span.row) + gap, canvas.work_height - 2 * gap
        if span.kind in timeline.lanes:
            lane = timeline.lanes.index(span.kind)
            y, height = canvas.y(span.row) + canvas.work_height, canvas.lane_height
            y, height, width = y + lane * height, height - 0.5, max(2.5, width)
        elif span.kind not in WORK and span.kind != "SEND":
            # Fetches and reductions run beside the work: a strip at the bottom of the row.
            y, height = y + 0.72 * height, 0.28 * height
        width = max(0.4, width - min(0.6, 0.15 * width))
        color = palette.fill(span.kind, span.microbatch, timeline.num_microbatches)
        if canvas.with_hover:
            yield (
                f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' "
                f"fill='{color}'><title>{escape(timeline.describe(span))}</title></rect>"
            )
        else:
            corner = f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
            paths.setdefault(color, []).append(corner)
    for color, corners in paths.items():
        yield f"<path fill='{color}' d='{''.join(corners)}'/>"
    yield from _labels(canvas)


def _labels(canvas: Canvas) -> Iterator[str]:
    size = min(11, canvas.work_height - 4)
    if size < 7:
        return
    yield f"<g font-size='{size:g}' text-anchor='middle' pointer-events='none'>"
    for span in canvas.timeline.spans:
        label = canvas.timeline.label(span)
        width = (span.end - span.start) * canvas.scale
        if label and span.kind in WORK and width >= 0.66 * size * len(label):
            x = canvas.x(span.start) + width / 2
            y = canvas.y(span.row) + canvas.work_height / 2 + 0.36 * size
            yield f"<text x='{x:.1f}' y='{y:.1f}' fill='{palette.ink(span.kind)}'>{label}</text>"
    yield "</g>"


def _time_axis(canvas: Canvas) -> Iterator[str]:
    timeline = canvas.timeline
    for tick in _ticks(timeline.drawn_end - timeline.start):
        x = canvas.x(timeline.start + tick)
        yield f"<path d='M{x:.1f} {canvas.bottom:g}v4' stroke='#999999'/>"
        yield _text(x, canvas.bottom + 15, f"{tick:g}", 10, "#555555", "middle")
    yield _text(canvas.left - 6, canvas.bottom + 15, timeline.unit, 10, "#555555", "end")


def _legend(canvas: Canvas) -> Iterator[str]:
    timeline = canvas.timeline
    x = canvas.left
    for kind in _kinds(timeline):
        color = palette.fill(kind, 0, timeline.num_microbatches)
        yield f"<rect x='{x:.0f}' y='48' width='10' height='10' fill='{color}'/>"
        yield _text(x + 14, 57, NAMES[kind], 10, "#444444")
        x += _legend_step(kind)
    count = timeline.num_microbatches
    each = min(12, 160 / count)
    yield _text(x, 57, f"{timeline.batches_are} 0", 10, "#444444")
    x += 6.2 * len(timeline.batches_are) + 12
    for microbatch in range(count):
        color = palette.fill("F", microbatch, count)
        yield (
            f"<rect x='{x + microbatch * each:.2f}' y='48' width='{each:.2f}' height='10' "
            f"fill='{color}'/>"
        )
    yield _text(x + count * each + 4, 57, f"{count - 1}", 10, "#444444")


def _kinds(timeline: Timeline) -> list[str]:
    """The kinds in the legend, in its order."""
    kinds = {span.kind for span in timeline.spans}
    return [kind for kind in NAMES if kind in kinds]


def _legend_step(kind: str) -> float:
    return 32 + 6.0 * len(NAMES[kind])


def shown_curves(timeline: Timeline) -> list[tuple[int, str]]:
    """The index and name of each curve in the key: all, or of more than 8 the first and last."""
    names = list(timeline.curves)
    return (
        list(enumerate(names)) if len(names) <= 8 else [(0, names[0]), (len(names) - 1, names[-1])]
    )


def _curves(canvas: Canvas) -> Iterator[str]:
    timeline = canvas.timeline
    if not timeline.curves:
        return
    top, height = canvas.bottom + 46, _CURVES_HEIGHT
    most = max((value for curve in timeline.curves.values() for _, value in curve), default=0) or 1
    yield _text(canvas.left, top - 8, timeline.curves_label, 10, "#444444")
    # The values are counts, so ticks are whole numbers.
    for tick in (tick for tick in _ticks(most, 4) if tick == round(tick)):
        y = top + height * (1 - tick / most)
        yield f"<path d='M{canvas.left:g} {y:.1f}H{canvas.right:.1f}' stroke='#e4e4e4'/>"
        yield _text(canvas.left - 6, y + 3.5, f"{tick:g}", 10, "#555555", "end")
    for row, (name, curve) in enumerate(timeline.curves.items()):
        path: list[str] = []
        for time, value in curve:
            y = top + height * (1 - value / most)
            path.append(
                f"H{canvas.x(time):.1f}V{y:.1f}" if path else f"M{canvas.x(time):.1f} {y:.1f}"
            )
        color = palette.line(row, len(timeline.curves))
        yield (
            f"<path d='{''.join(path)}H{canvas.right:.1f}' fill='none' stroke='{color}' "
            f"stroke-width='1.3' stroke-opacity='0.85'><title>{escape(name)}</title></path>"
        )
    yield from _curve_key(canvas, top - 8)


def _curve_key(canvas: Canvas, y: float) -> Iterator[str]:
    """The key: the colour of each row's curve."""
    names = list(canvas.timeline.curves)
    x = canvas.left + 6.2 * len(canvas.timeline.curves_label) + 16
    for row, name in shown_curves(canvas.timeline):
        color = palette.line(row, len(names))
        yield f"<path d='M{x:.0f} {y - 3.5:.1f}h14' stroke='{color}' stroke-width='2.5'/>"
        yield _text(x + 18, y, name, 10, "#444444")
        x += _KEY_STEP + 6.2 * len(name)


def _ticks(length: float, about: int = 12) -> list[float]:
    """About `about` round numbers from 0 up to `length`."""
    if length <= 0:
        return [0]
    power = 10.0 ** (
        len(f"{length / about:.0f}") - 1 if length / about >= 1 else -_leading(length / about)
    )
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * about >= length)
    return [i * step for i in range(int(length / step + 1e-9) + 1)]


def _leading(fraction: float) -> int:
    """The decimal place of the first nonzero digit of a number below one."""
    places = 0
    while fraction < 1:
        fraction *= 10
        places += 1
    return places


def _text(
    x: float, y: float, text: str, size: float, color: str = "#1c1c1c", anchor: str = "start",
    weight: str = "normal",
) -> str:  # fmt: skip
    if not text:
        return ""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{color}' "
        f"text-anchor='{anchor}' font-weight='{weight}'>{escape(text)}</text>"
    )

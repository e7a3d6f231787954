"""A chart as SVG: lines and points over a linear or logarithmic axis, with markers and a key."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 78, 34, 76, 54
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


@dataclass(frozen=True)
class Series:
    """Named points (x, y): a line, a dashed line, or points alone, in color number `color`."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "line"  # or "dashed", "points"
    color: int = 0

    @property
    def fill(self) -> str:
        return COLORS[self.color % len(COLORS)]

    @property
    def stroke(self) -> str:
        dash = " stroke-dasharray='6 4'" if self.style == "dashed" else ""
        return f"stroke='{self.fill}' stroke-width='2.2'{dash}"


@dataclass(frozen=True)
class ReferenceLine:
    """A vertical line at `x`, or a horizontal one at `y`, with a text."""

    text: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True)
class ChartAxis:
    """The label of an axis, its scale, and how its ticks are written."""

    label: str
    is_log: bool = False
    show: Callable[[float], str] = lambda value: f"{value:g}"
    ticks: Sequence[float] | None = None


def draw_chart(
    title: str,
    series: Sequence[Series],
    x: ChartAxis,
    y: ChartAxis,
    *,
    caption: str = "",
    markers: Sequence[ReferenceLine] = (),
) -> str:
    """The chart as a self-contained SVG."""
    xs = [point[0] for one in series for point in one.points]
    xs += [marker.x for marker in markers if marker.x is not None]
    ys = [point[1] for one in series for point in one.points]
    ys += [marker.y for marker in markers if marker.y is not None]
    across = _Scale(x, min(xs), max(xs), LEFT, WIDTH - RIGHT)
    low, high = (min(ys), max(ys) * 2) if y.is_log else (0, max(ys) * 1.05)
    up = _Scale(y, low, high, HEIGHT - BOTTOM, TOP)
    height = HEIGHT + 18 * len(series)
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"viewBox='0 0 {WIDTH} {height}' {FONT} font-size='12'>",
        f"<rect width='{WIDTH}' height='{height}' fill='white'/>",
        f"<text x='{LEFT}' y='24' font-size='15' font-weight='bold'>{escape(title)}</text>",
        f"<text x='{LEFT}' y='44' fill='#555'>{escape(caption)}</text>",
        *_grid(across, up),
    ]
    for marker in markers:
        lines += _marker(marker, across, up)
    for one in series:
        lines += _series(one, across, up)
    for row, one in enumerate(series):
        lines += _key_line(HEIGHT + 18 * row, one)
    return "\n".join([*lines, "</svg>\n"])


class _Scale:
    """Maps values of an axis to pixels."""

    def __init__(self, axis: ChartAxis, low: float, high: float, start: float, end: float) -> None:
        self.axis, self.low, self.high, self.start, self.end = axis, low, high, start, end

    def __call__(self, value: float) -> float:
        if self.axis.is_log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return round(self.start + part * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        if self.axis.ticks is not None:
            return [tick for tick in self.axis.ticks if self.low <= tick <= self.high]
        if self.axis.is_log:
            first = math.ceil(math.log10(self.low) - 1e-9)
            last = math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1)]
        rough = (self.high - self.low) / 6
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * many for many in (1, 2, 5, 10) if unit * many >= rough)
        first = math.ceil(self.low / step - 1e-9)
        return [step * number for number in range(first, int(self.high / step + 1e-9) + 1)]


def _grid(across: _Scale, up: _Scale) -> list[str]:
    lines = []
    for tick in across.ticks():
        at = across(tick)
        lines.append(f"<path d='M{at} {TOP}V{HEIGHT - BOTTOM}' stroke='#e4e4e4'/>")
        label = escape(across.axis.show(tick))
        lines.append(
            f"<text x='{at}' y='{HEIGHT - BOTTOM + 17}' text-anchor='middle'>{label}</text>"
        )
    for tick in up.ticks():
        at = up(tick)
        lines.append(f"<path d='M{LEFT} {at}H{WIDTH - RIGHT}' stroke='#e4e4e4'/>")
        label = escape(up.axis.show(tick))
        lines.append(f"<text x='{LEFT - 8}' y='{at + 4}' text-anchor='end'>{label}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    label = escape(across.axis.label)
    lines.append(f"<text x='{middle}' y='{HEIGHT - 14}' text-anchor='middle'>{label}</text>")
    lines.append(f"<text x='{LEFT}' y='{TOP - 8}' fill='#555'>{escape(up.axis.label)}</text>")
    return lines


def _series(one: Series, across: _Scale, up: _Scale) -> list[str]:
    places = [(across(x), up(y)) for x, y in one.points]
    if one.style == "points":
        return [
            f"<circle cx='{a}' cy='{b}' r='4.5' fill='{one.fill}' stroke='white'>"
            f"<title>{escape(one.name)}: {escape(across.axis.show(x))}, "
            f"{escape(up.axis.show(y))}</title></circle>"
            for (a, b), (x, y) in zip(places, one.points, strict=True)
        ]
    path = "L".join(f"{a} {b}" for a, b in places)
    return [f"<path d='M{path}' fill='none' {one.stroke}/>"]


def _marker(marker: ReferenceLine, across: _Scale, up: _Scale) -> list[str]:
    style = "stroke='#777' stroke-dasharray='2 3'"
    if marker.x is not None:
        at = across(marker.x)
        is_right = at > (LEFT + WIDTH - RIGHT) / 2
        anchor, text_at = ("end", at - 6) if is_right else ("start", at + 6)
        return [
            f"<path d='M{at} {TOP}V{HEIGHT - BOTTOM}' {style}/>",
            f"<text x='{text_at}' y='{TOP + 14}' fill='#555' text-anchor='{anchor}'>"
            f"{escape(marker.text)}</text>",
        ]
    at = up(marker.y or 0)
    return [
        f"<path d='M{LEFT} {at}H{WIDTH - RIGHT}' {style}/>",
        f"<text x='{WIDTH - RIGHT - 4}' y='{at - 5}' fill='#555' text-anchor='end'>"
        f"{escape(marker.text)}</text>",
    ]


def _key_line(at: int, one: Series) -> list[str]:
    sign = f"<path d='M{LEFT} {at}h28' {one.stroke}/>"
    if one.style == "points":
        sign = f"<circle cx='{LEFT + 14}' cy='{at}' r='4.5' fill='{one.fill}'/>"
    return [sign, f"<text x='{LEFT + 38}' y='{at + 4}'>{escape(one.name)}</text>"]

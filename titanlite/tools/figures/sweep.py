"""The points of a sweep as a PNG or SVG: bubble against memory, makespan against workers."""

from __future__ import annotations

import textwrap
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from titanlite.tools.figures.chart import COLORS
from titanlite.tools.figures.figure import dress, make_figure, save_figure

_MARKERS = "osD^vPX"
_GREY = "#767676"
_TITLE_WIDTH = 88
_MOST_LABELS = 6  # as many names of points stay readable
_LEAST_DISTANCE = 0.045  # between names, as a share of the height

T = TypeVar("T")


class SweptPoint(NamedTuple):
    """One simulation. Points of one `series` and `line` differ in `x` alone, such as their workers.

    `label` says in a few characters where the point is in the grid. A point is on the front of
    memory if no other has a smaller bubble and less memory; on that of workers if no other of its
    job has a shorter makespan and fewer workers.
    """

    series: str
    line: str
    label: str
    x: float
    makespan: float
    memory: float
    bubble: float
    is_on_memory_front: bool
    is_on_workers_front: bool


class Style(NamedTuple):
    color: str
    marker: str
    size: float

    def marks(self, is_filled: bool) -> dict[str, Any]:
        """The arguments of `Axes.plot` for points without a line."""
        fill = self.color if is_filled else "white"
        look = {"color": self.color, "marker": self.marker, "markersize": self.size}
        return {**look, "markerfacecolor": fill, "linestyle": ""}


def save_sweep(
    path: str | Path,
    points: Sequence[SweptPoint],
    *,
    title: str,
    x_label: str,
    memory_label: str,
    time_label: str,
) -> None:
    """Draw the points as two plots, in the format of the suffix of `path`, .png or .svg.

    Points on a front are filled.
    """
    figure = make_figure(8.85, 4.6)
    left, right = figure.subplots(1, 2)
    names = list(dict.fromkeys(point.series for point in points))
    # Later series are smaller, so that points in one place are all seen.
    style = {
        name: Style(COLORS[i % len(COLORS)], _MARKERS[i % len(_MARKERS)], max(4, 8 - 1.4 * i))
        for i, name in enumerate(names)
    }
    _draw_memory(left, points, style)
    _draw_makespan(right, points, style)
    left.set_xlabel(memory_label)
    left.set_ylabel("bubble")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    right.set_xlabel(x_label)
    right.set_ylabel(time_label)
    for axes in (left, right):
        dress(axes)
        axes.tick_params(labelsize=9)
    figure.legend(
        handles=_key(names, style),
        loc="outside lower center",
        ncols=min(6, len(names) + 2),
        frameon=False,
    )
    lines = textwrap.fill(title, _TITLE_WIDTH)
    figure.suptitle(lines, x=0.01, ha="left", fontsize=12, parse_math=False)
    save_figure(figure, path)


def _draw_memory(axes: Axes, points: Sequence[SweptPoint], style: dict[str, Style]) -> None:
    for name, look in style.items():
        for is_on_front in (False, True):
            shown = [p for p in points if p.series == name and p.is_on_memory_front == is_on_front]
            memory, bubbles = [p.memory for p in shown], [p.bubble for p in shown]
            axes.plot(memory, bubbles, zorder=3 if is_on_front else 2, **look.marks(is_on_front))
    places: dict[tuple[float, float], SweptPoint] = {}
    for point in points:
        if point.is_on_memory_front:
            places.setdefault((point.memory, point.bubble), point)
    front = sorted(places)
    axes.step(*zip(*front, strict=True), where="post", color=_GREY, linewidth=1, zorder=1)
    _scale(axes, [point.memory for point in points], "x")
    axes.margins(x=0.08, y=0.08)
    axes.yaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    named = (-1.0, -1.0)
    for place in _some(front, _MOST_LABELS):
        x, y = _share(axes, place)
        if abs(x - named[0]) > 0.5 or abs(y - named[1]) > _LEAST_DISTANCE:
            _name(axes, places[place].label, place, 6)
            named = x, y


def _name(axes: Axes, text: str, place: tuple[float, float], above: float) -> None:
    """Write `text` beside a point: to its left if the point is on the right."""
    is_right = _share(axes, place)[0] > 0.7 and above > 0
    axes.annotate(
        text,
        place,
        textcoords="offset points",
        xytext=(-7 if is_right else 7, above),
        ha="right" if is_right else "left",
        fontsize=9,
        color=_GREY,
        parse_math=False,
    ).set_in_layout(above < 0)  # the names of lines are outside the points


def _share(axes: Axes, place: tuple[float, float]) -> tuple[float, float]:
    """Where a point is in the axes: 0 to 1 in both directions."""
    axes.autoscale_view()
    x, y = axes.transAxes.inverted().transform(axes.transData.transform(place))
    return float(x), float(y)


def _draw_makespan(axes: Axes, points: Sequence[SweptPoint], style: dict[str, Style]) -> None:
    lines: dict[Hashable, list[SweptPoint]] = {}
    for point in points:
        lines.setdefault((point.series, point.line), []).append(point)
    ends: dict[str, SweptPoint] = {}
    for shown in lines.values():
        shown.sort(key=lambda point: point.x)
        last, look = shown[-1], style[shown[0].series]
        x, y = [point.x for point in shown], [point.makespan for point in shown]
        axes.plot(x, y, color=look.color, linewidth=1, alpha=0.5)
        for point in shown:
            axes.plot(point.x, point.makespan, **look.marks(point.is_on_workers_front))
        if last.line and (last.line not in ends or ends[last.line].makespan < last.makespan):
            ends[last.line] = last
    values = sorted({point.x for point in points})
    _scale(axes, values, "x")
    _scale(axes, [point.makespan for point in points], "y")
    if len(values) <= 10:
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.18)
    height = -1.0
    for point in sorted(ends.values(), key=lambda end: end.makespan):
        place = point.x, point.makespan
        if _share(axes, place)[1] - height > _LEAST_DISTANCE:
            _name(axes, point.line, place, -3)
            height = _share(axes, place)[1]


def _some(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _scale(axes: Axes, values: Sequence[float], side: str) -> None:
    """A logarithmic axis where values differ by more than a factor of 8, with plain numbers."""
    if min(values) > 0 and max(values) / min(values) > 8:
        getattr(axes, f"set_{side}scale")("log")
        axis = getattr(axes, f"{side}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _key(names: Sequence[str], style: dict[str, Style]) -> list[Line2D]:
    marks = [
        Line2D([], [], color=style[n].color, marker=style[n].marker, linestyle="", label=n)
        for n in names
    ]
    front = Line2D([], [], color=_GREY, marker="o", linestyle="", label="on the Pareto front")
    other = Line2D([], [], color=_GREY, marker="o", linestyle="", label="not on it")
    other.set_markerfacecolor("white")
    return [*marks, front, other]

"""A chart as SVG: lines and points over a linear or logarithmic axis, with markers and a key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_QUIET = "#767676"  # lighter on a dark page (figure.py)


@dataclass(frozen=True)
class Series:
    """Named points (x, y): a line, a dashed line, or points alone, in color number `color`."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "line"  # or "dashed", "points"
    color: int = 0


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
    """The chart as a self-contained SVG, as wide as a page of text."""
    # matplotlib is slow to import.
    from matplotlib.ticker import FuncFormatter, NullLocator

    from titanlite.tools.figures.figure import dress, figure_svg, make_figure

    figure = make_figure(8.85, 4.3 + 0.2 * len(series))
    axes = figure.add_subplot()
    axes.margins(y=0.12)  # room for the texts of markers
    points: dict[str, Any] = {"linestyle": "", "marker": "o", "zorder": 3}
    looks = {"line": {"linestyle": "-"}, "dashed": {"linestyle": "--"}, "points": points}
    for one in series:
        look = looks[one.style]
        color = COLORS[one.color % len(COLORS)]
        xs, ys = zip(*one.points, strict=True)
        axes.plot(xs, ys, label=one.name, gid=one.name, color=color, linewidth=2, **look)
    for side, axis in (("x", x), ("y", y)):
        drawn = getattr(axes, f"{side}axis")
        if axis.is_log:
            getattr(axes, f"set_{side}scale")("log")
        elif side == "y":
            axes.set_ylim(bottom=0)
        if axis.ticks is not None:
            drawn.set_ticks(axis.ticks)
        drawn.set_minor_locator(NullLocator())
        drawn.set_major_formatter(FuncFormatter(lambda value, _, show=axis.show: show(value)))
    line: dict[str, Any] = {"color": _QUIET, "linestyle": ":", "linewidth": 1.2}
    for marker in markers:
        text: dict[str, Any] = {"textcoords": "offset points", "color": _QUIET, "fontsize": 9}
        if marker.x is None:
            at = marker.y or 0.0
            axes.axhline(at, **line)
            text |= {"xycoords": axes.get_yaxis_transform(), "xytext": (-5, 2), "ha": "right"}
            axes.annotate(marker.text, (0.99, at), **text)
            continue
        axes.axvline(marker.x, **line)
        is_right = axes.transData.transform((marker.x, 1))[0] > axes.bbox.x1 * 0.6
        text |= {"xycoords": axes.get_xaxis_transform(), "va": "top"}
        text |= {"xytext": (-5 if is_right else 5, 0), "ha": "right" if is_right else "left"}
        axes.annotate(marker.text, (marker.x, 0.98), **text)
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    dress(axes)
    axes.set_title(caption, loc="left", fontsize=10, color=_QUIET, parse_math=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", parse_math=False)
    figure.legend(loc="outside lower left", frameon=False, ncols=1)
    return figure_svg(figure)

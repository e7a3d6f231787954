"""A matplotlib figure that is written the same each time, without pyplot.

pyplot keeps global state and looks for a display.
"""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from titanlite.tools.figures.palette import GRID

# For a dark page: paper and points that are not filled, text and axes, quiet text, and the grid.
_STYLE = """<style>@media (prefers-color-scheme: dark) {
text {fill: #e6edf3} [style*="fill: #ffffff"] {fill: #0d1117 !important}
[style*="stroke: #000000"], [style*="stroke: #767676"] {stroke: #a9b4c0 !important}
[style*="fill: #767676"] {fill: #a9b4c0 !important}
[style*="stroke: #e4e4e4"] {stroke: #373e47 !important}
[style*="stroke: #0072b2"] {stroke: #4c86e8 !important}
[style*="fill: #0072b2"] {fill: #4c86e8 !important}}</style>
"""


def make_figure(width: float, height: float, dpi: float = 110) -> Figure:
    """An empty figure of `width` x `height` inches."""
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes) -> None:
    """A grid behind what is drawn, and no line above and to the right."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write `figure` as the suffix of `path` says, as .svg or as a PNG, into its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".svg":
        path.write_text(figure_svg(figure), encoding="utf-8")
    else:
        figure.savefig(path, format="png", facecolor="white")


def figure_svg(figure: Figure) -> str:
    """`figure` as a self-contained SVG, in light and in dark."""
    # No date and no random identifiers: equal figures give equal files.
    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "titanlite", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    head, defs, rest = file.getvalue().partition(" <defs>")
    return head + _STYLE + defs + rest

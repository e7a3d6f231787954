"""A matplotlib figure that is written the same each time, without pyplot.

pyplot keeps global state and looks for a display.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> Figure:
    """An empty figure of `width` x `height` inches."""
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write `figure` as the suffix of `path` says, .png or .svg."""
    # No date and no random identifiers: equal figures give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "titanlite", "svg.fonttype": "none"}):
        metadata = {"Date": None} if Path(path).suffix.lower() == ".svg" else None
        figure.savefig(path, facecolor="white", metadata=metadata)

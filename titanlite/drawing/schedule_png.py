"""A timeline as a PNG file; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from titanlite.drawing import palette
from titanlite.drawing.schedule_svg import Canvas
from titanlite.schedule.actions import ScheduleError
from titanlite.schedule.timeline import WORK, Timeline


def draw_png(timeline: Timeline, path: str | Path, dpi: int = 110) -> None:
    """Write `timeline` to `path`. Raises ScheduleError if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ScheduleError("a PNG needs matplotlib; install it, or draw SVG") from error

    canvas = Canvas.of(timeline)
    rows = len(timeline.rows)
    figure = Figure(figsize=(canvas.width / 100, canvas.height / 100))
    FigureCanvasAgg(figure)
    if timeline.curves:
        ratio = [max(1, rows * canvas.row_height), 110]
        axes, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": ratio})
    else:
        axes, below = figure.subplots(), None
    bars: dict[tuple[int, str, bool], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        color = palette.fill(span.kind, span.microbatch, timeline.num_microbatches)
        beside = span.kind not in WORK and span.kind != "SEND"
        bars.setdefault((span.row, color, beside), []).append((span.start, span.end - span.start))
    for (row, color, beside), pieces in bars.items():
        height = (row + 0.22, 0.26) if beside else (row - 0.48, 0.96)
        axes.broken_barh(pieces, height, facecolors=color, edgecolor="white", linewidth=0.2)
    size = min(8, 0.5 * canvas.row_height)
    for span in timeline.spans:
        label = timeline.label(span)
        width = (span.end - span.start) * canvas.scale
        if label and span.kind in WORK and size >= 5 and width >= 0.9 * size * len(label):
            middle = (span.start + span.end) / 2
            ink = palette.ink(span.kind)
            axes.text(middle, span.row, label, ha="center", va="center", fontsize=size, color=ink)
    every = 1 if canvas.row_height >= 12 else 4
    axes.set_yticks(range(0, rows, every), timeline.rows[::every], fontsize=8)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(timeline.start, timeline.drawn_end)
    axes.set_facecolor("#f1f1f1")
    axes.set_title(f"{timeline.title}\n{timeline.caption}", fontsize=9, loc="left")
    bottom = axes
    if below is not None:
        for row, curve in enumerate(timeline.curves.values()):
            times, values = zip(*curve, strict=True)
            color = palette.line(row, len(timeline.curves))
            below.step(times, values, where="post", linewidth=1, color=color)
        below.set_ylabel(timeline.curves_label.replace(", ", ",\n"), fontsize=7)
        below.tick_params(labelsize=8)
        bottom = below
    bottom.set_xlabel(timeline.unit, fontsize=8)
    axes.tick_params(labelsize=8)
    figure.savefig(path, dpi=dpi, bbox_inches="tight")

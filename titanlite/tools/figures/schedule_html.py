"""Timelines as one self-contained HTML page: SVGs with hover text and zoom."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.schedule.timeline import Timeline
from titanlite.tools.figures.page_file import FOLDER, make_page
from titanlite.tools.figures.schedule_layout import Canvas, canvases_of, cells
from titanlite.tools.figures.schedule_svg import draw_canvases


def draw_html(timelines: Sequence[Timeline] | Timeline, table: str = "") -> str:
    """A page with the pictures below each other, and `table` (HTML) above them.

    Hovering over a cell shows its work, row, start and end. Two buttons zoom.
    """
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    title = ", ".join(timeline.title for timeline in timelines)
    canvases = canvases_of(timelines)
    figures = "\n".join(f"<figure>{picture}</figure>" for picture in draw_canvases(canvases))
    data = [_hover_data(canvas) for canvas in canvases]
    return make_page(FOLDER / "schedule", title, data, table=table, figures=figures)


def _hover_data(canvas: Canvas) -> dict[str, object]:
    """By row, the box of each cell in pixels and its description, from back to front."""
    timeline = canvas.timeline
    rows: list[list[list[object]]] = [[] for _ in timeline.rows]
    for span, box in cells(canvas):
        edges = box.x, box.y, box.x + box.width, box.y + box.height
        rows[span.row].append([*(round(edge, 2) for edge in edges), timeline.describe(span)])
    return {"top": canvas.top, "rowHeight": canvas.row_height, "rows": rows}

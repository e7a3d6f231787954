"""A timeline as SVG, and as a page with hover text and zoom.

One row per rank, time across, coloured by microbatch, curves below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Any

from titanlite.schedule.walk import WORK
from titanlite.tools.figures.page_file import FOLDER, make_page
from titanlite.tools.figures.palette import STYLE
from titanlite.tools.figures.schedule_layout import (
    WIDTH,
    Box,
    Canvas,
    Label,
    Line,
    SpanBox,
    Text,
    canvases_of,
    cells,
    marks,
)
from titanlite.tools.figures.timeline import Timeline

_FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
_MOST_CELLS_WITH_HOVER = 4000  # beyond that, cells of one colour are drawn as one path


def draw_svg(*timelines: Timeline) -> str:
    """One self-contained SVG element, with several timelines below each other.

    It is as wide as a page of text. Cells have a hover text, unless there are more than 4,000.
    """
    canvases = canvases_of(timelines, WIDTH)
    pictures = draw_canvases(canvases)
    height = sum(canvas.height for canvas in canvases)
    y, parts = 0.0, [_opening(max(canvas.width for canvas in canvases), height), STYLE]
    for picture, canvas in zip(pictures, canvases, strict=True):
        parts.append(picture.replace("<svg ", f"<svg y='{y:.0f}' ", 1))
        y += canvas.height
    return "\n".join([*parts, "</svg>"])


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


def draw_canvases(canvases: Sequence[Canvas]) -> list[str]:
    """The SVG element of each timeline."""
    num_cells = sum(len(canvas.timeline.spans) for canvas in canvases)
    with_hover = num_cells <= _MOST_CELLS_WITH_HOVER
    return ["\n".join(_elements(canvas, with_hover)) for canvas in canvases]


def _elements(canvas: Canvas, with_hover: bool) -> Iterator[str]:
    yield _opening(canvas.width, canvas.height)
    for kind, group in groupby(marks(canvas), type):
        if kind is SpanBox:
            yield from (_hovered if with_hover else _paths)(canvas.timeline, group)
        elif kind is Label:
            yield from _labels(group)
        else:
            draw: dict[type, Any] = {Box: lambda box: f"{_rect(box)}/>", Text: _text, Line: _line}
            yield from map(draw[kind], group)
    yield "</svg>"


def _hovered(timeline: Timeline, drawn: Iterable[Any]) -> Iterator[str]:
    for span, box in drawn:
        yield f"{_rect(box)}><title>{escape(timeline.describe(span))}</title></rect>"


def _paths(timeline: Timeline, drawn: Iterable[Any]) -> Iterator[str]:
    """One path for the cells of a colour that follow each other in the order of drawing."""
    for _, group in groupby(drawn, lambda cell: cell.span.kind in WORK):
        paths: dict[str, list[str]] = {}
        for cell in group:
            x, y, width, height, fill = cell.box
            corner = f"M{x:.2f} {y:.2f}h{width:.2f}v{height:.2f}h-{width:.2f}z"
            paths.setdefault(fill, []).append(corner)
        yield from (f"<path fill='{fill}' d='{''.join(all_)}'/>" for fill, all_ in paths.items())


def _labels(labels: Iterable[Any]) -> Iterator[str]:
    every = list(labels)
    size = 11 if all(_fits(label, 11) for label in every) else 10
    yield f"<g font-size='{size}' text-anchor='middle' pointer-events='none'>"
    for label in (label for label in every if _fits(label, size)):
        x, y = f"{label.x:.1f}", f"{label.y + 0.36 * size:.1f}"
        yield f"<text x='{x}' y='{y}' fill='{label.color}'>{label.text}</text>"
    yield "</g>"


def _fits(label: Label, size: float) -> bool:
    return label.height >= size + 2 and label.width >= 0.6 * size * len(label.text)


def _rect(box: Box) -> str:
    x, y, width, height = (f"{round(length, 2):.7g}" for length in box[:4])
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='{box.fill}'"


def _opening(width: float, height: float) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {_FONT}>"
    )


def _line(line: Line) -> str:
    (x, y), *rest = line.points
    steps = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in rest:
        steps.append(f"H{to_x:.1f}" if to_y == y else f"V{to_y:.1f}" if to_x == x else "")
        x, y = to_x, to_y
    style = f"fill='none' stroke='{line.color}' stroke-width='{line.width:g}'"
    if not line.name:
        return f"<path d='{''.join(steps)}' {style}/>"
    return (
        f"<path d='{''.join(steps)}' {style} stroke-opacity='0.85'>"
        f"<title>{escape(line.name)}</title></path>"
    )


def _text(text: Text) -> str:
    return (
        f"<text x='{text.x:.1f}' y='{text.y:.1f}' font-size='{text.size:g}' fill='{text.color}' "
        f"text-anchor='{text.anchor}' font-weight='{text.weight}'>{escape(text.text)}</text>"
    )

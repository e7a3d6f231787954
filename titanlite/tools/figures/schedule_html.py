"""Timelines as one self-contained HTML page: SVGs with hover text and zoom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from titanlite.observe.pictures.schedule_layout import Canvas, canvases_of, cells
from titanlite.observe.pictures.schedule_svg import draw_canvases
from titanlite.schedule.timeline import Timeline


def draw_html(timelines: Sequence[Timeline] | Timeline, table: str = "") -> str:
    """A page with the pictures below each other, and `table` (HTML) above them.

    Hovering over a cell shows its work, row, start and end. Two buttons zoom.
    """
    if isinstance(timelines, Timeline):
        timelines = [timelines]
    title = ", ".join(timeline.title for timeline in timelines)
    canvases = canvases_of(timelines)
    figures = "\n".join(f"<figure>{picture}</figure>" for picture in draw_canvases(canvases))
    data = json.dumps([_hover_data(canvas) for canvas in canvases], separators=(",", ":"))
    return _PAGE.format(
        title=escape(title),
        table=table,
        figures=figures,
        data=data.replace("</", "<\\/"),
        script=_SCRIPT,
    )


def _hover_data(canvas: Canvas) -> dict[str, object]:
    """By row, the box of each cell in pixels and its description, from back to front."""
    timeline = canvas.timeline
    rows: list[list[list[object]]] = [[] for _ in timeline.rows]
    for span, box in cells(canvas):
        edges = box.x, box.y, box.x + box.width, box.y + box.height
        rows[span.row].append([*(round(edge, 2) for edge in edges), timeline.describe(span)])
    return {"top": canvas.top, "rowHeight": canvas.row_height, "rows": rows}


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
  body {{ font: 14px 'DejaVu Sans', Verdana, sans-serif; margin: 16px; color: #1c1c1c; }}
  figure {{ margin: 0 0 24px; overflow-x: auto; }}
  table {{ border-collapse: collapse; margin-bottom: 20px; }}
  th, td {{ padding: 3px 12px; text-align: right; border-bottom: 1px solid #dddddd; }}
  th:first-child, td:first-child {{ text-align: left; }}
  #tip {{ position: fixed; display: none; pointer-events: none; background: #1c1c1c;
    color: #ffffff; padding: 4px 8px; border-radius: 4px; font-size: 12px; white-space: nowrap; }}
  button {{ font: inherit; padding: 0 10px; }}
</style>
</head>
<body>
<p><button id="out">&minus;</button> <button id="in">+</button> zoom; hover a cell for its work</p>
{table}
{figures}
<div id="tip"></div>
<script>const DATA = {data};
{script}</script>
</body>
</html>
"""

_SCRIPT = """
const tip = document.getElementById('tip');
const pictures = [...document.querySelectorAll('figure > svg')];
pictures.forEach((svg, i) => {
  const d = DATA[i];
  svg.querySelectorAll('title').forEach(title => title.remove());
  svg.addEventListener('mousemove', event => {
    const at = new DOMPoint(event.clientX, event.clientY)
      .matrixTransform(svg.getScreenCTM().inverse());
    const row = d.rows[Math.floor((at.y - d.top) / d.rowHeight)];
    const cell = row && row.findLast(([left, top, right, bottom]) =>
      left <= at.x && at.x < right && top <= at.y && at.y < bottom);
    tip.style.display = cell ? 'block' : 'none';
    if (!cell) return;
    tip.textContent = cell[4];
    const room = window.innerWidth - tip.offsetWidth - 8;
    tip.style.left = Math.min(event.clientX + 12, room) + 'px';
    tip.style.top = (event.clientY + 14) + 'px';
  });
  svg.addEventListener('mouseleave', () => { tip.style.display = 'none'; });
});
const zoom = factor => pictures.forEach(svg => ['width', 'height'].forEach(side =>
  svg.setAttribute(side, svg.getAttribute(side) * factor)));
document.getElementById('in').onclick = () => zoom(1.5);
document.getElementById('out').onclick = () => zoom(1 / 1.5);
"""

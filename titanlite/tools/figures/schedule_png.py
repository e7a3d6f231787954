"""A timeline as a PNG file, drawn with Pillow: the same picture as the SVG, in pixels."""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont

from titanlite.tools.figures.schedule_layout import Box, Canvas, Label, SpanBox, Text, marks
from titanlite.tools.figures.timeline import Timeline

LABELLED_PIXELS = 12
"""A cell of this width and height has its label; a smaller one if it fits in _READABLE pixels."""
_READABLE = 8.0
_CHARACTER_WIDTH = 0.64  # of the size of the font, on average
_MOST_PIXELS = 100_000_000
_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def draw_png(timeline: Timeline, path: str | Path, scale: float = 2.0) -> None:
    """Write `timeline` to `path`, with `scale` pixels per pixel of its SVG.

    A picture of over 100 million pixels gets fewer per pixel of its SVG.
    """
    canvas = Canvas.of(timeline)
    scale = min(scale, sqrt(_MOST_PIXELS / (canvas.width * canvas.height)))
    size = max(1, round(canvas.width * scale)), max(1, round(canvas.height * scale))
    image = Image.new("RGB", size, "#ffffff")
    draw = ImageDraw.Draw(image)
    for mark in marks(canvas):
        if isinstance(mark, Box | SpanBox):
            x, y, width, height, fill = mark.box if isinstance(mark, SpanBox) else mark
            left, top = round(x * scale), round(y * scale)
            right, bottom = round((x + width) * scale) - 1, round((y + height) * scale) - 1
            draw.rectangle((left, top, max(left, right), max(top, bottom)), fill)
        elif isinstance(mark, Label):
            size_pixels = label_size(mark, scale)
            if size_pixels:
                at = mark.x * scale, mark.y * scale
                draw.text(at, mark.text, mark.color, _font(size_pixels), anchor="mm")
        elif isinstance(mark, Text):
            font = _font(mark.size * scale, mark.weight == "bold")
            at = mark.x * scale, mark.y * scale
            draw.text(at, mark.text, mark.color, font, anchor=_ANCHORS[mark.anchor])
        else:
            points = [(x * scale, y * scale) for x, y in mark.points]
            draw.line(points, mark.color, max(1, round(mark.width * scale)))
    image.save(path, "PNG")


def label_size(label: Label, scale: float = 1.0) -> float:
    """The size of the font, in pixels, with which `label` fits into its cell; 0 if it has none."""
    width, height = label.width * scale, label.height * scale
    size = min(11 * scale, 0.8 * height, 0.95 * width / (_CHARACTER_WIDTH * len(label.text)))
    return size if size >= _READABLE or min(width, height) >= LABELLED_PIXELS else 0.0


@lru_cache(maxsize=256)
def _font(size: float, is_bold: bool = False) -> Any:
    """DejaVu Sans, which comes with matplotlib."""
    name = "DejaVuSans-Bold.ttf" if is_bold else "DejaVuSans.ttf"
    return ImageFont.truetype(f"{get_data_path()}/fonts/ttf/{name}", size)

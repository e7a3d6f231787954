"""Messages between ranks over steps, as SVG and as a page to step through. Torch-free.

Rows are ranks, time goes to the right. An arrow is a message, a box is work, and a bar is a
collective whose messages are not visible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape

from titanlite.tools.figures import palette
from titanlite.tools.figures.canvas import FAINT, PAPER, RANKS, Drawing
from titanlite.tools.figures.page_file import FOLDER, make_page

ROW, TOP, LETTER = 58, 84, 6.3
HALO = f' paint-order="stroke" stroke="{PAPER}" stroke-width="3"'


@dataclass(frozen=True)
class Arrow:
    """A message that leaves `source` at the step `start` and arrives at `target` one step later."""

    source: int
    target: int
    start: int
    text: str
    hover: str = ""


@dataclass(frozen=True)
class WorkBox:
    """Work of one row from `start` to `end`."""

    row: int
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Bar:
    """A collective of some rows, from `start` to one step later."""

    rows: tuple[int, ...]
    start: int
    text: str
    hover: str = ""


@dataclass(frozen=True)
class MessagePicture:
    """What is drawn: `length` steps of the ranks named by `rows`.

    `before` and `after` are texts beside each row. `held` has, for each step from 0 to `length` and
    each row, what the rank holds then; only the page shows it.
    """

    title: str
    caption: str
    rows: Sequence[str]
    length: int
    arrows: Sequence[Arrow] = ()
    boxes: Sequence[WorkBox] = ()
    bars: Sequence[Bar] = ()
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    held: Sequence[Sequence[Sequence[str]]] = ()


def draw_svg(picture: MessagePicture, most_steps: int = 0) -> str:
    """One self-contained SVG element; shapes have hover texts.

    With `most_steps`, a longer picture goes on below, as lines of a text do.
    """
    if not most_steps or picture.length <= most_steps:
        return _Layout(picture).draw()
    unit = _Layout(picture).unit
    lines = [
        _Layout(_part(picture, start, start + most_steps), unit, start)
        for start in range(0, picture.length, most_steps)
    ]
    width, height = max(line.width for line in lines), sum(line.height for line in lines)
    whole = Drawing(round(width), round(height), escape(picture.title)).svg()
    drawn, y = [], 0.0
    for line in lines:
        drawn.append(line.draw().replace("<svg ", f'<svg y="{y:g}" ', 1))
        y += line.height
    return whole.replace("</svg>", "".join(drawn) + "</svg>")


def _part(picture: MessagePicture, start: int, end: int) -> MessagePicture:
    """The steps from `start` to `end` alone, counted from 0; only the first part has titles."""
    return replace(
        picture,
        title=picture.title if start == 0 else "",
        caption=picture.caption if start == 0 else "",
        length=min(end, picture.length) - start,
        arrows=[
            replace(one, start=one.start - start)
            for one in picture.arrows
            if start <= one.start < end
        ],
        bars=[
            replace(one, start=one.start - start)
            for one in picture.bars
            if start <= one.start < end
        ],
        boxes=[
            replace(one, start=max(one.start, start) - start, end=min(one.end, end) - start)
            for one in picture.boxes
            if one.start < end and one.end > start
        ],
    )


def draw_page(picture: MessagePicture) -> str:
    """A self-contained HTML page that steps through the picture by the arrow keys.

    At each step it shows what each rank holds and the messages that fly. It loads nothing.
    """
    layout = _Layout(picture)
    data = {**asdict(picture), "left": layout.left, "unit": layout.unit, "colors": RANKS}
    title = picture.title or "Messages between ranks"
    return make_page(
        FOLDER / "messages", title, data, length=picture.length, overview=layout.draw()
    )


class _Layout:
    """The scale of a picture and the places on it."""

    def __init__(self, picture: MessagePicture, unit: float = 0.0, first: int = 0) -> None:
        self.picture, self.first = picture, first
        longest = max((len(arrow.text) for arrow in picture.arrows), default=0)
        boxes = max((len(box.text) for box in picture.boxes), default=0)
        self.unit = unit or max(44.0, LETTER * longest + 22, LETTER * boxes + 14)
        before = max(map(len, [*picture.rows, ""])) + max(map(len, [*picture.before, ""]))
        self.left = 34 + LETTER * before
        self.right = self.x(picture.length)
        after = 24 + LETTER * max(map(len, [*picture.after, ""]))
        titles = LETTER * max(1.2 * len(picture.title), len(picture.caption)) + 24
        self.width = max(self.right + after, titles)
        self.height = TOP + ROW * (len(picture.rows) - 1) + 46

    def x(self, step: float) -> float:
        return self.left + step * self.unit

    def y(self, row: int) -> float:
        return TOP + row * ROW

    def draw(self) -> str:
        picture = self.picture
        drawing = Drawing(round(self.width), round(self.height), escape(picture.title))
        drawing.text(12, 20, escape(picture.title), bold=True, size=13)
        drawing.text(12, 38, escape(picture.caption), size=11, colour="#555555")
        last = self.y(len(picture.rows) - 1)
        for step in range(picture.length + 1):
            drawing.line(self.x(step), TOP - 22, self.x(step), last + 22, "#e9e9e9")
        for step in range(picture.length):
            middle = self.x(step + 0.5)
            drawing.text(middle, last + 38, f"step {self.first + step}", "middle", "#777777", 10)
        for row, name in enumerate(picture.rows):
            y = self.y(row)
            drawing.line(self.left, y, self.right, y, FAINT)
            ink = RANKS[row % len(RANKS)] if row % len(RANKS) != 1 else "#b87e00"
            drawing.text(12, y + 4, escape(name), colour=ink, bold=True)
            if picture.before:
                drawing.text(self.left - 8, y + 4, escape(picture.before[row]), "end")
            if picture.after:
                drawing.text(self.right + 8, y + 4, escape(picture.after[row]))
        for bar in picture.bars:
            self.bar(drawing, bar, *_lane(bar, picture.bars))
        for box in picture.boxes:
            self.box(drawing, box)
        for arrow in picture.arrows:
            self.arrow(drawing, arrow)
        for arrow in picture.arrows:
            x, y = self.x(arrow.start) + 8, self.y(arrow.source) - (16 if picture.boxes else 6)
            drawing.text(x, y, escape(arrow.text), size=11, more=HALO)
        return drawing.svg()

    def arrow(self, drawing: Drawing, arrow: Arrow) -> None:
        start = self.x(arrow.start) + 4, self.y(arrow.source)
        end = self.x(arrow.start + 1) - 9, self.y(arrow.target)
        with drawing.titled(escape(arrow.hover or arrow.text)):
            drawing.circle(*start, 3, RANKS[arrow.source % len(RANKS)])
            drawing.arrow(start, end, RANKS[arrow.source % len(RANKS)], 1.8, opacity=0.9)

    def box(self, drawing: Drawing, box: WorkBox) -> None:
        x, width = self.x(box.start) + 2, (box.end - box.start) * self.unit - 4
        with drawing.titled(escape(f"{self.picture.rows[box.row]}: {box.text}")):
            drawing.rectangle(x, self.y(box.row) - 12, width, 24, _fill(box.text), "#999999")
            y = self.y(box.row) + 4
            drawing.text(x + width / 2, y, escape(box.text), "middle", size=11)

    def bar(self, drawing: Drawing, bar: Bar, lane: int, num_lanes: int) -> None:
        width = (self.unit - 10) / num_lanes
        x = self.x(bar.start) + 5 + lane * width
        top, bottom = self.y(min(bar.rows)) - 16, self.y(max(bar.rows)) + 16
        with drawing.titled(escape(bar.hover or bar.text)):
            drawing.rectangle(x, top, width, bottom - top, "#f3ead7", "#c9a95c")
            for row in bar.rows:
                drawing.circle(x, self.y(row), 3, RANKS[row % len(RANKS)])
            # Upright, in several lines if it is too long for one.
            lines = _wrapped(bar.text, int((bottom - top) / LETTER))
            for number, line in enumerate(lines):
                middle_x = x + width / 2 + 4 + 13 * (number - (len(lines) - 1) / 2)
                middle_y = (top + bottom) / 2
                turned = f' transform="rotate(-90 {middle_x:g} {middle_y:g})"'
                drawing.text(middle_x, middle_y, escape(line), "middle", size=11, more=turned)


def _lane(bar: Bar, bars: Sequence[Bar]) -> tuple[int, int]:
    """The place of a bar among those that would overlap it, and their number."""
    beside = [
        other
        for other in bars
        if other.start == bar.start
        and min(other.rows) <= max(bar.rows)
        and min(bar.rows) <= max(other.rows)
    ]
    return beside.index(bar), len(beside)


def _wrapped(text: str, length: int) -> list[str]:
    """The text in lines of at most `length` characters, broken after spaces and dots."""
    lines = [""]
    # A number stays together, and with its unit.
    for part in re.split(r"(?<= )(?![KM]?i?B\b)|(?<=\.)(?!\d+ )", text):
        if len((lines[-1] + part).rstrip(", ")) > length and lines[-1]:
            lines.append("")
        lines[-1] += part
    return [line.rstrip(", ") for line in lines]


def _fill(name: str) -> str:
    """The colours of a schedule for F0, B3 and the like; one colour for all other work."""
    found = re.fullmatch(r"([FBIW])(\d+)", name)
    return palette.fill(found[1], int(found[2]), 8) if found else "#dfe9f2"

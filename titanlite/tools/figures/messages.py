"""Messages between ranks over steps, as SVG and as a page to step through. Torch-free.

Rows are ranks, time goes to the right. An arrow is a message, a box is work, and a bar is a
collective whose messages are not visible.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import accumulate
from math import ceil
from typing import Any

from titanlite.tools.figures.canvas import INKS, RANKS, Drawing
from titanlite.tools.figures.page_file import FOLDER, make_page
from titanlite.tools.figures.palette import FAINT, GRID, ON_CELL, PAPER, PHASES, QUIET, STYLE

ROW, LETTER = 62, 6.2
WIDTH = 932  # of a line; a text of 11 pixels is read at 10 on a page
_KINDS = {"forward": "F", "x A": "F", "backward": "B", "dy A^T": "I", "x^T dy": "W"}
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


def draw_svg(picture: MessagePicture) -> str:
    """One self-contained SVG element; shapes have hover texts.

    A picture that is wider than a page goes on below, as lines of a text do.
    """
    whole_line = _Layout(picture)
    num_lines = ceil((whole_line.right - whole_line.left) / (WIDTH - whole_line.beside))
    if num_lines <= 1:
        return whole_line.draw()
    most_steps = ceil(picture.length / num_lines)
    lines = [
        _Layout(_part(picture, start, start + most_steps), whole_line.unit, start)
        for start in range(0, picture.length, most_steps)
    ]
    width, height = max(line.width for line in lines), sum(line.height for line in lines)
    whole = Drawing(round(width), round(height), escape(picture.title)).svg()
    drawn, y = [], 0.0
    for line in lines:
        drawn.append(line.draw().replace(STYLE, "").replace("<svg ", f'<svg y="{y:g}" ', 1))
        y += line.height
    return whole.replace("</svg>", "".join(drawn) + "</svg>")


def _part(picture: MessagePicture, start: int, end: int) -> MessagePicture:
    """The steps from `start` to `end` alone, counted from 0; only the first part has titles."""

    def moved(shapes: Sequence[Any]) -> list[Any]:
        return [replace(s, start=s.start - start) for s in shapes if start <= s.start < end]

    titles = {} if start == 0 else {"title": "", "caption": ""}
    return replace(
        picture,
        **titles,
        length=min(end, picture.length) - start,
        arrows=moved(picture.arrows),
        bars=moved(picture.bars),
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
    data = {**asdict(picture), "places": layout.places, "colors": RANKS, "inks": INKS}
    title = picture.title or "Messages between ranks"
    return make_page(
        FOLDER / "messages",
        title,
        data,
        length=picture.length,
        overview=layout.draw().replace(STYLE, ""),
    )


class _Layout:
    """The scale of a picture and the places on it."""

    def __init__(self, picture: MessagePicture, unit: float = 0.0, first: int = 0) -> None:
        self.picture, self.first = picture, first
        boxes = max((len(box.text) for box in picture.boxes), default=0)
        least = 28.0 if picture.boxes else 44.0 if picture.bars else 64.0
        self.unit = unit or max(least, LETTER * boxes + 5)
        self.left = 24 + LETTER * max(map(len, [*picture.rows, ""]))
        sides = [max(map(len, [*side, ""])) for side in (picture.before, picture.after)]
        before, after = ((12 + 1.1 * LETTER * length) * bool(length) for length in sides)
        self.left += before
        # Arrows change rows in a gap at the end of their step, each in a lane of its own. Of those
        # that go the same way, the last in that direction is leftmost: so they do not cross.
        ways = {one: 1 if one.target < one.source else -1 for one in picture.arrows}
        self.lanes: dict[Arrow, int] = {}
        self.gaps = [0] * picture.length
        for arrow in sorted(ways, key=lambda one: (ways[one], ways[one] * one.source)):
            self.lanes[arrow] = self.gaps[arrow.start] = max(16, self.gaps[arrow.start] + 4)
        needs = [(box.start, LETTER * len(box.text) + 7) for box in picture.boxes]
        for bar in picture.bars:
            num_lanes = _lane(bar, picture.bars)[1]
            needs.append((bar.start, max(34.0, 10 + num_lanes * (12 * len(_wrapped(bar)) + 8))))
        needs += [(a.start, 1.3 * LETTER * len(line) + 2) for a in ways for line in _lines(a)]
        widths = [self.unit] * picture.length
        for step, need in needs:
            widths[step] = max(widths[step], self.gaps[step] + need)
        self.places = list(accumulate(widths, initial=self.left))
        self.right = self.places[-1]
        self.beside = self.left + 12 + after
        self.top = 84 if picture.title else 36
        titles = LETTER * max(1.2 * len(picture.title), len(picture.caption)) + 24
        self.width = max(self.right + 12 + after, titles)
        self.height = self.top + ROW * (len(picture.rows) - 1) + 56

    def y(self, row: int) -> float:
        return self.top + row * ROW

    def draw(self) -> str:
        picture = self.picture
        drawing = Drawing(round(self.width), round(self.height), escape(picture.title))
        drawing.text(12, 20, escape(picture.title), bold=True, size=13)
        drawing.text(12, 38, escape(picture.caption), size=11, colour=QUIET)
        last = self.y(len(picture.rows) - 1)
        for step in range(picture.length + 1):
            drawing.line(self.places[step], self.top - 22, self.places[step], last + 22, GRID)
        drawing.text(12, last + 48, "time", colour=QUIET, size=11)
        for step in range(picture.length):
            middle = (self.places[step] + self.places[step + 1]) / 2
            drawing.text(middle, last + 48, f"{self.first + step}", "middle", QUIET, 11)
        for row, name in enumerate(picture.rows):
            y = self.y(row)
            drawing.line(self.left, y, self.right, y, FAINT)
            drawing.text(12, y + 4, escape(name), colour=INKS[row % len(INKS)], bold=True)
            if picture.before:
                drawing.text(self.left - 8, y + 4, escape(picture.before[row]), "end")
            if picture.after:
                drawing.text(self.right + 8, y + 4, escape(picture.after[row]))
        for arrow in picture.arrows:
            self.arrow(drawing, arrow)
        for bar in picture.bars:
            self.bar(drawing, bar, *_lane(bar, picture.bars))
        for box in picture.boxes:
            self.box(drawing, box)
        for arrow in picture.arrows:
            # Above its line; below it if a box is above.
            aside, lines = self.aside(arrow), _lines(arrow)
            x, y = self.places[arrow.start] + 8, self.y(arrow.source) + aside
            y += 11 if aside > 0 else -6 - 12 * (len(lines) - 1)
            for number, line in enumerate(lines):
                drawing.text(x, y + 12 * number, escape(line), size=11, more=HALO)
        return drawing.svg()

    def arrow(self, drawing: Drawing, arrow: Arrow) -> None:
        color, end = RANKS[arrow.source % len(RANKS)], self.places[arrow.start + 1]
        turn = 4 if arrow.target > arrow.source else -4
        x0, y0 = self.places[arrow.start] + 4, self.y(arrow.source) + self.aside(arrow)
        x1, y1 = end - 7, self.y(arrow.target) - turn
        x = end - self.gaps[arrow.start] + self.lanes[arrow] - 12
        with drawing.titled(escape(arrow.hover or arrow.text)):
            drawing.circle(x0, y0, 3, color)
            drawing.elements.append(
                f'<path d="M{x0:g},{y0:g} H{x - 4:g} q4,0 4,{turn} V{y1 - turn:g} q0,{turn} '
                f'4,{turn} H{x1:g}" fill="none" stroke="{color}" stroke-width="1.8"/>'
            )
            drawing.polygon([(x1 + 6, y1), (x1 - 2, y1 - 4), (x1 - 2, y1 + 4)], color)

    def aside(self, arrow: Arrow) -> int:
        """How far an arrow stays below, or above, the line of its source if that works."""
        works = any(
            box.row == arrow.source and box.start <= arrow.start < box.end
            for box in self.picture.boxes
        )
        return 17 * works * (1 if arrow.target > arrow.source else -1)

    def box(self, drawing: Drawing, box: WorkBox) -> None:
        x = self.places[box.start] + 1
        width = self.places[box.end] - self.gaps[box.end - 1] - x - 1
        with drawing.titled(escape(f"{self.picture.rows[box.row]}: {box.text}")):
            drawing.rectangle(x, self.y(box.row) - 12, width, 24, _fill(box.text), "#999999")
            y = self.y(box.row) + 4
            drawing.text(x + width / 2, y, escape(box.text), "middle", ON_CELL, 11)

    def bar(self, drawing: Drawing, bar: Bar, lane: int, num_lanes: int) -> None:
        room = self.places[bar.start + 1] - self.places[bar.start] - self.gaps[bar.start]
        width = (room - 10) / num_lanes
        x = self.places[bar.start] + 5 + lane * width
        top, bottom = self.y(min(bar.rows)) - 16, self.y(max(bar.rows)) + 16
        with drawing.titled(escape(bar.hover or bar.text)):
            drawing.rectangle(x, top, width, bottom - top, "#f3ead7", "#c9a95c")
            for row in bar.rows:
                drawing.circle(x, self.y(row), 3, RANKS[row % len(RANKS)])
            # Upright, in several lines if it is too long for one.
            lines = _wrapped(bar)
            for number, line in enumerate(lines):
                middle_x = x + width / 2 + 4 + 12 * (number - (len(lines) - 1) / 2)
                middle_y = (top + bottom) / 2
                turned = f' transform="rotate(-90 {middle_x:g} {middle_y:g})"'
                drawing.text(middle_x, middle_y, escape(line), "middle", ON_CELL, 11, more=turned)


def _lines(arrow: Arrow) -> list[str]:
    """Its text, with the size on a line of its own."""
    return re.split(r", (?=\d)", arrow.text)


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


def _wrapped(bar: Bar) -> list[str]:
    """Its text in lines that fit its height, broken after spaces and dots."""
    lines, length = [""], int((ROW * (max(bar.rows) - min(bar.rows)) + 32) / LETTER)
    # A number stays together, and with its unit.
    for part in re.split(r"(?<= )(?![KM]?i?B\b)|(?<=\.)(?!\d+ )", bar.text):
        if len((lines[-1] + part).rstrip(", ")) > length and lines[-1]:
            lines.append("")
        lines[-1] += part
    return [line.rstrip(", ") for line in lines]


def _fill(name: str) -> str:
    """The colours of a schedule for F0, B3 and the like; one colour for all other work."""
    kind = name[:1] if re.fullmatch(r"[FBIW]\d+", name) else _KINDS.get(name, "")
    return PHASES[kind][0] if kind else "#dfe9f2"

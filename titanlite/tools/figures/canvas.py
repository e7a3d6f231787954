"""A small SVG canvas and the colours of ranks, for drawings made of a few shapes."""

import contextlib
from collections.abc import Iterator

from titanlite.tools.figures.palette import INK, PAPER, STYLE

# Okabe and Ito's colours, which colour-blind readers can tell apart; then others. INKS: for text.
RANKS = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7"),
    *("#d55e00", "#56b4e9", "#7a5195", "#7f7f7f"),
)
INKS = ("#0072b2", "#a87000", "#008a65", "#b8578f", "#c25500", "#2780b9", "#7a5195", "#6f6f6f")


class Drawing:
    """An SVG of a given size, element by element; `svg` gives its text."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height = width, height
        self.elements = [f"<title>{title}</title>"]
        self.rectangle(0, 0, width, height, PAPER)

    def rectangle(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "none"
    ) -> None:
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )

    def polygon(self, corners: list[tuple[float, float]], fill: str) -> None:
        points = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self.elements.append(f'<polygon points="{points}" fill="{fill}"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str) -> None:
        self.elements.append(f'<path d="M{x0:g},{y0:g} L{x1:g},{y1:g}" stroke="{colour}"/>')

    def circle(self, x: float, y: float, radius: float, colour: str) -> None:
        self.elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{colour}"/>')

    @contextlib.contextmanager
    def titled(self, title: str) -> Iterator[None]:
        """What is drawn inside has this hover text."""
        self.elements.append(f"<g><title>{title}</title>")
        yield
        self.elements.append("</g>")

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: str = "start",
        colour: str = INK,
        size: int = 12,
        bold: bool = False,
        more: str = "",
    ) -> None:
        """`more` has further attributes."""
        weight = ' font-weight="bold"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" '
            f'font-size="{size}"{weight}{more}>{words}</text>'
        )

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" font-family="sans-serif">'
        )
        return "\n".join([head, STYLE, *self.elements, "</svg>", ""])

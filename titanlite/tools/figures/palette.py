"""The colours of diagrams: a hue for each kind of work, lighter for every second stage of a rank.

Where the text of a cell is its stage, the hue is that of the microbatch (`fill`).
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TextIO

from titanlite.observe.terminal import is_terminal

PHASES = {
    "F": ("#9ecae1", "#c6dbef"),
    "B": ("#fdae6b", "#fdd0a2"),
    "I": ("#fdae6b", "#fdd0a2"),
    "W": ("#74c476", "#b2dfb0"),
}
# What a picture has besides: text, quiet text, paper, idle time, lines.
INK, QUIET, PAPER, IDLE, GRID = "#1c1c1c", "#555555", "#ffffff", "#f1f1f1", "#e4e4e4"
FAINT = "#c8c8c8"
_LIGHT: tuple[str, ...] = (INK, QUIET, PAPER, IDLE, GRID, FAINT)
_DARK: tuple[str, ...] = ("#e6edf3", "#a9b4c0", "#0d1117", "#22272e", "#373e47", "#545d68")
# Reductions, and ranks (canvas.py), whose colours are too dark there.
_LIGHT += ("#4d4d4d", "#0072b2", "#a87000", "#008a65", "#b8578f", "#c25500", "#2780b9", "#7a5195")
_DARK += ("#e6edf3", "#4c86e8", "#e69f00", "#1fb088", "#d58bb4", "#e8772e", "#56b4e9", "#a57fc4")
# Text on a cell, which keeps its colour in the dark.
ON_CELL = "#1b1b1b"
STYLE = (
    "<style>@media (prefers-color-scheme: dark) {"
    + "".join(
        f'[{part}="{light}"]{{{part}:{dark}}}'
        for light, dark in zip(_LIGHT, _DARK, strict=True)
        for part in ("fill", "stroke")
    )
    + "}</style>"
)
"""For an SVG: its colours on a dark page."""
# Of one lightness, as OKLCH measures it, around the circle.
_HUES = (
    *("95d0ff", "b7c5ff", "d7bbff", "f0b2ee", "ffaed0", "ffafaf"),
    *("ffb591", "f6bf7c", "decb79", "bed688", "9adea4", "7ae1c5"),
)
_SHADE = {"F": 1.0, "B": 0.78, "I": 0.78, "W": 0.6}
MOVING = {"SEND": "#b9b9b9", "FETCH": "#8a8a8a", "REDUCE_GRAD": "#4d4d4d"}
# Okabe and Ito's colours, stronger than the pastel colours of the work.
LANES = {
    "SEND_TO": "#0072b2",
    "RECEIVE": "#e69f00",
    "GATHER": "#009e73",
    "REDUCE": "#d55e00",
    "EXCHANGE": "#cc79a7",
}


def uses_color(stream: TextIO) -> bool:
    """Whether colours may be written to `stream`: a terminal, and no NO_COLOR."""
    return is_terminal(stream) and "NO_COLOR" not in os.environ


@lru_cache(maxsize=16_384)
def fill(kind: str, microbatch: int | None, num_microbatches: int) -> str:
    """The colour of a cell as #rrggbb: data movement in greys, work by microbatch."""
    if kind not in _SHADE or microbatch is None:
        return MOVING.get(kind) or LANES.get(kind, "#8a8a8a")
    count = len(_HUES)
    place = microbatch * count // num_microbatches if num_microbatches <= count else microbatch
    parts = bytes.fromhex(_HUES[place % count])
    return "#" + bytes(round(part * _SHADE[kind]) for part in parts).hex()

"""The colours of diagrams: a hue for each kind of work, lighter for every second stage of a rank.

Where the text of a cell is its stage, the hue is that of the microbatch (`fill`).
"""

from __future__ import annotations

from functools import lru_cache
from math import cos, pi, sin

PHASES = {
    "F": ("#9ecae1", "#c6dbef"),
    "B": ("#fdae6b", "#fdd0a2"),
    "I": ("#fdae6b", "#fdd0a2"),
    "W": ("#74c476", "#b2dfb0"),
}
# What a picture has besides: text, quiet text, paper, idle time, lines; in light and in dark.
INK, QUIET, PAPER, IDLE, GRID = "#1c1c1c", "#555555", "#ffffff", "#f1f1f1", "#e4e4e4"
FAINT = "#c8c8c8"
_LIGHT = (INK, QUIET, PAPER, IDLE, GRID, FAINT)
_DARK = ("#e6edf3", "#a9b4c0", "#0d1117", "#22272e", "#373e47", "#545d68")
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
_LIGHTNESS = {"F": 0.84, "B": 0.68, "I": 0.68, "W": 0.54}
MOVING = {"SEND": "#b9b9b9", "FETCH": "#8a8a8a", "REDUCE_GRAD": "#4d4d4d"}
OTHER = "#8a8a8a"
# Okabe and Ito's colours, stronger than the pastel colours of the work.
LANES = {
    "SEND_TO": "#0072b2",
    "RECEIVE": "#e69f00",
    "GATHER": "#009e73",
    "REDUCE": "#d55e00",
    "EXCHANGE": "#cc79a7",
}


@lru_cache(maxsize=16_384)
def fill(kind: str, microbatch: int | None, num_microbatches: int) -> str:
    """The colour of a cell as #rrggbb: data movement in greys, work by microbatch."""
    if kind not in _LIGHTNESS or microbatch is None:
        return MOVING.get(kind) or LANES.get(kind, OTHER)
    hue = 250 + 310 * microbatch / max(1, num_microbatches)
    # With many microbatches, neighbours have similar hues and alternate in lightness.
    shade = 0.03 * (microbatch % 2) if num_microbatches > 12 else 0.0
    return _oklch_to_hex(_LIGHTNESS[kind] - shade, 0.105, hue)


def ink(kind: str) -> str:
    """The colour of text on a cell of this kind."""
    return "#ffffff" if kind == "W" else ON_CELL


def line(row: int, num_rows: int) -> str:
    """The colour of a row's curve; rows range from violet to green."""
    return _oklch_to_hex(0.55 + 0.22 * row / max(1, num_rows - 1), 0.12, 300 - 150 * row / num_rows)


def _oklch_to_hex(lightness: float, chroma: float, hue_degrees: float) -> str:
    """Equal steps look equal in OKLCH. Ottosson 2020, https://bottosson.github.io/posts/oklab/."""
    a = chroma * cos(hue_degrees * pi / 180)
    b = chroma * sin(hue_degrees * pi / 180)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(1, max(0, part)))):02x}" for part in linear)


def _gamma(linear: float) -> float:
    return 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055

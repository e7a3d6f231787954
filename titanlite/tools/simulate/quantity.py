"""Numbers of seconds and bytes, and how they are shown.

Inside, a simulation computes with plain numbers. Where all times have units, these are seconds;
where all sizes have units, bytes.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from titanlite.quantities import format_bytes, format_count, three_figures

SECONDS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
SECONDS["ns"] = Fraction(1, 10**9)
BYTES = {"B": 1}
BYTES |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
BYTES |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}


class Quantity(NamedTuple):
    """A number of seconds ("s"), bytes ("B") or bytes per second ("B/s"), as it was written."""

    value: int | Fraction
    unit: str
    text: str

    def __str__(self) -> str:
        return self.text

    def __float__(self) -> float:
        return float(self.value)


def format_seconds(seconds: float) -> str:
    """A short time with its unit: 0.00123 -> "1.23 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{three_figures(seconds / size)} {unit}"
    return f"{three_figures(seconds / 1e-6)} us"


def show_time(value: float | Fraction, unit: str) -> str:
    """A time: "1.23 ms" in seconds, else a plain number."""
    return format_seconds(float(value)) if unit == "s" and value else f"{float(value):g}"


def show_size(value: float | Fraction, unit: str) -> str:
    """A size: "1.50 GiB" in bytes, else a plain number."""
    return format_bytes(float(value)) if unit == "B" else f"{float(value):g}"


def show_rate(value: float, unit: str) -> str:
    """A number per time: "12.3/s" in seconds, else a plain number."""
    return f"{format_count(value)}/s" if unit == "s" else f"{value:.3g}"


def time_scale(longest: float | Fraction, unit: str) -> tuple[str, float]:
    """The unit in which times up to `longest` are drawn, and how many of it make one."""
    if unit != "s":
        return "steps", 1
    for name, scale in (("s", 1), ("ms", 1e3)):
        if longest * scale >= 1:
            return name, scale
    return "us", 1e6


def size_scale(largest: float | Fraction, unit: str) -> tuple[str, float]:
    """The unit in which sizes up to `largest` are drawn, and how many of it make one."""
    if unit != "B":
        return "", 1
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if largest >= BYTES[name]:
            return name, 1 / BYTES[name]
    return "B", 1

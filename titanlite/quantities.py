"""Human-readable quantities, 12.3k, 1.50 GiB, 1.23 ms, 0:04:10, of three digits."""

import math

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Bytes of an element, by dtype."""

_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_count(value: float, *, spaced: bool = False) -> str:
    """A number with a decimal prefix: 12345 -> "12.3k", or "12.3 k" if `spaced` (for units)."""
    if not math.isfinite(value):
        return str(value)
    scaled, prefix = _scale(value, 1000, _DECIMAL)
    return three_figures(scaled) + (" " if spaced else "") + prefix


def format_bytes(num_bytes: float) -> str:
    """Bytes with a binary unit: 1610612736 -> "1.50 GiB"."""
    scaled, unit = _scale(num_bytes, 1024, _BINARY)
    return f"{int(scaled)} B" if unit == "B" else f"{three_figures(scaled)} {unit}"


def format_duration(seconds: float) -> str:
    """Seconds as hours:minutes:seconds, preceded by days from 24 hours on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{days}d {clock}" if days else clock


def _scale(value: float, base: int, prefixes: tuple[str, ...]) -> tuple[float, str]:
    for prefix in prefixes[:-1]:
        # 999.5 would round to 1000 of this unit, so it is shown as 1.00 of the next.
        if abs(value) < base and abs(value) < 999.5:
            return value, prefix
        value /= base
    return value, prefixes[-1]


def three_figures(value: float) -> str:
    size = abs(value)
    if size == int(size) and size < 10:
        return f"{value:.0f}"
    return f"{value:.2f}" if size < 9.995 else f"{value:.1f}" if size < 99.95 else f"{value:.0f}"

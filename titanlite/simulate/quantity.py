"""Numbers with units, 1.5ms, 4GiB and 50GB/s: read from options, and shown.

Inside, a simulation computes with plain numbers. Where all times have units, these are seconds;
where all sizes have units, bytes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from titanlite.observe.quantities import format_bytes, format_count, format_seconds
from titanlite.simulate.work import SimulationError

LARGEST = 1e100
SECONDS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6)}
SECONDS["ns"] = Fraction(1, 10**9)
BYTES = {"B": 1}
BYTES |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}
BYTES |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)}
_WITH_UNIT = re.compile(r"(.*[0-9.])\s*([A-Za-z]+(?:/s)?)")


class Quantity(NamedTuple):
    """A number of seconds ("s"), bytes ("B") or bytes per second ("B/s"), as it was written."""

    value: int | Fraction
    unit: str
    text: str

    def __str__(self) -> str:
        return self.text

    def __float__(self) -> float:
        return float(self.value)


Read = int | float | Fraction | Quantity


def number(text: str) -> int | float | Fraction:
    """A number of ordinary size, for an option's type: an int if it is whole, "1/3" a Fraction."""
    try:
        value: float | Fraction = Fraction(text) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not -LARGEST <= value <= LARGEST:  # NaN is not either
        raise argparse.ArgumentTypeError(f"{text} is not a number up to {LARGEST:.0e}")
    if isinstance(value, float) and value == int(value):
        return int(Fraction(text)) if value else 0
    return value


def factor(text: str) -> int | float | Fraction:
    """A number above 0, for an option's type."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def read_time(text: str) -> Read:
    """A time, for an option's type: a number, or one with the unit s, ms, us or ns."""
    return _read(text, SECONDS, "s")


def read_size(text: str) -> Read:
    """A size, for an option's type: a number, or one with the unit B, KB, KiB, MB, MiB, ..."""
    return _read(text, BYTES, "B")


def read_rate(text: str) -> Read:
    """A bandwidth above 0, for an option's type: a number, or one with a unit such as GB/s."""
    found = _read(text, {f"{unit}/s": scale for unit, scale in BYTES.items()}, "B/s")
    if float(found) <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return found


def _read(text: str, units: Mapping[str, int | Fraction], unit: str) -> Read:
    match = _WITH_UNIT.fullmatch(text.strip())
    if match is None:
        return number(text)
    if match[2] not in units:
        raise argparse.ArgumentTypeError(f"{text!r}: the unit must be one of {', '.join(units)}")
    value = number(match[1])
    return Quantity(Fraction(str(value)) * units[match[2]], unit, text)


def read_units(
    options: argparse.Namespace,
    times: Sequence[str],
    sizes: Sequence[str],
    rates: Sequence[str],
) -> tuple[dict[str, Any], Literal["", "s"], Literal["", "B"]]:
    """The values of options without units, None if not given, and the units of times and sizes.

    A rate "bandwidth" becomes the time "time_per_unit". Either all times have a unit or none has,
    and so with sizes; 0 needs none. Raises SimulationError where that is not so.
    """
    given = {name: getattr(options, name) for name in (*times, *sizes, *rates)}
    for name in rates:
        per_unit = name.replace("bandwidth", "time_per_unit")
        if given[name] is not None and given[per_unit] is not None:
            raise SimulationError(f"{_spell(name)}: {_spell(per_unit)} says the same; give one")
    # The times that are not given have no unit.
    compute = {"forward": given["forward"] or 1, "backward": given["backward"] or 2}
    time_unit = _common_unit({**{n: given[n] for n in (*times, *rates)}, **compute}, "s")
    size_unit = _common_unit({n: given[n] for n in (*sizes, *rates)}, "B")
    values = {name: _without_unit(value) for name, value in given.items()}
    for name in rates:
        bandwidth = values.pop(name)
        if bandwidth is not None:
            values[name.replace("bandwidth", "time_per_unit")] = 1 / Fraction(str(bandwidth))
    return values, "s" if time_unit else "", "B" if size_unit else ""


def _common_unit(values: Mapping[str, Any], unit: str) -> bool:
    """Whether the values have units. Raises SimulationError if some have and some have not."""
    with_unit: dict[str, Quantity] = {}
    without: dict[str, Any] = {}
    for name, value in values.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, Quantity):
                with_unit.setdefault(name, one)
            elif one:
                without.setdefault(name, one)
    if with_unit and without:
        has, lacks = next(iter(with_unit)), next(iter(without))
        example = {"s": "1ms", "B": "1MiB"}[unit]
        raise SimulationError(
            f"{_spell(lacks)}: {without[lacks]} has no unit, but {_spell(has)} {with_unit[has]} "
            f"has one; give all of them one, as in {example}, or none"
        )
    return bool(with_unit)


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_unit(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_unit(one) for one in value]
    return value.value if isinstance(value, Quantity) else value


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

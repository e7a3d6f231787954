"""Options with units, 1.5ms, 4GiB and 50GB/s: all times have one or none has, and so sizes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from titanlite.tools.simulate.options import number
from titanlite.tools.simulate.quantity import BYTES, SECONDS, Quantity
from titanlite.tools.simulate.work import SimulationError

_WITH_UNIT = re.compile(r"(.*[0-9.])\s*([A-Za-z]+(?:/s)?)")
Read = int | float | Fraction | Quantity


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
            f"has one; give all of them one (also those with a default), as in {example}, or none"
        )
    return bool(with_unit)


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_unit(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_unit(one) for one in value]
    return value.value if isinstance(value, Quantity) else value

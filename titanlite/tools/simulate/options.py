"""Options of a command: which were given and used, numbers with and without units, output files.

All times of a run have a unit, as in 1.5ms, or none has, and so with sizes (4GiB, 50GB/s).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.options import CommandParser, choice, require_writable, whole, write
from titanlite.tools.simulate.quantity import BYTES, SECONDS, Quantity
from titanlite.tools.simulate.result import Simulation
from titanlite.tools.simulate.work import SimulationError

LARGEST = 1e100
LEAST_WIDTH = 30
_WITH_UNIT = re.compile(r"(.*[0-9.])\s*([A-Za-z]+(?:/s)?)")
Read = int | float | Fraction | Quantity

# Why an option of one run has no effect, if no simulation uses it.
UNUSED = {
    "group_size": "only LoopedPipeline and FSDPLoopedPipeline have groups",
    "weight_gradient": "no backward pass is split; --split-backward splits those of a strategy",
    "latency": "nothing is sent",
    "time_per_unit": "nothing is sent that has a size; --activation-units and --weight-units give "
    "sizes",
    "workers_per_node": "links inside a node are as all others; --inside-latency and "
    "--inside-time-per-unit change them",
    "inside_latency": "no two workers are in one node; --workers-per-node gives their number",
    "inside_time_per_unit": "no two workers are in one node, or nothing sent has a size",
    "overlap": "nothing is sent that takes time",
    "bandwidth": "nothing is sent that has a size; --activation-units and --weight-units give "
    "sizes",
    "inside_bandwidth": "no two workers are in one node, or nothing sent has a size",
    "prefetch": "no weights are fetched that take time",
    "fetch_contention": "no weights are fetched that take time",
    "reduce_gradients": "no stage has several workers and a size; --weight-units gives it one",
}


class Parser(CommandParser):
    """A parser that tells which options were given."""

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
        """All options, and the spelling of those that were given, by name."""
        defaults = vars(self.parse_args([]))
        unset = object()
        found = self.parse_args(arguments, argparse.Namespace(**dict.fromkeys(defaults, unset)))
        values = {name: value for name, value in vars(found).items() if value is not unset}
        spelled = {a.dest: a.option_strings[-1] for a in self._actions if a.option_strings}
        given = {name: spelled[name] for name in values if name in spelled}
        return argparse.Namespace(**{**defaults, **values}), given

    def type_of(self, name: str) -> Callable[[str], object] | None:
        """How one value of the option is read; None if it takes none."""
        for action in self._actions:
            if action.dest == name and action.nargs != 0:
                if action.choices is not None:
                    return choice(action.choices)
                return action.type if callable(action.type) else str
        return None


def characters(text: str) -> int:
    """The width of a picture in the terminal, for an option's type."""
    if whole(text) < LEAST_WIDTH:
        raise argparse.ArgumentTypeError(f"{text} is too narrow; give at least {LEAST_WIDTH}")
    return whole(text)


def number(text: str) -> float | Fraction:
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


def factor(text: str) -> float | Fraction:
    """A number above 0, for an option's type."""
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def check_outputs(options: argparse.Namespace, extensions: Mapping[str, Sequence[str]]) -> None:
    """Raise TitanliteError unless the files of the options in `extensions` can be written."""
    for name, known in extensions.items():
        file = getattr(options, name)
        if file is None:
            continue
        if Path(file).suffix.lower() not in known:
            raise SimulationError(f"--{name}: the name {file!r} must end in {' or '.join(known)}")
        require_writable(file, f"--{name}")


def write_timelines(
    options: argparse.Namespace, timelines: Sequence[Timeline], table: str = ""
) -> list[str]:
    """Write the files that the options --svg and --html name; returns lines to print.

    `table` is HTML above the pictures of a page.
    """
    wrote = []
    if options.svg or options.html:
        from titanlite.tools.figures.schedule_svg import draw_html, draw_svg

        if options.svg:
            wrote.append(write(options.svg, draw_svg(*timelines)))
        if options.html:
            wrote.append(write(options.html, draw_html(timelines, table)))
    return wrote


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
    options: argparse.Namespace, times: Sequence[str], sizes: Sequence[str], rates: Sequence[str]
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


def check_used(given: Mapping[str, str], used: Collection[str], schemes: Collection[str]) -> None:
    """Raise SimulationError for an option that was given, but that no simulation has used."""
    for name, option in given.items():
        if name in UNUSED and name not in used:
            names = ", ".join(dict.fromkeys(schemes))
            raise SimulationError(f"{option}: has no effect on {names}: {UNUSED[name]}")


def used_options(simulation: Simulation) -> set[str]:
    """Those of UNUSED that a simulation depends on."""
    costs = simulation.costs
    used = {"group_size"} if simulation.title.endswith("LoopedPipeline") else set()
    if simulation.is_split:
        used.add("weight_gradient")
    network = costs.network
    if network is None:
        return used
    sends, fetches = any(simulation.activation_transmissions), any(simulation.weight_transmissions)
    sized = any(costs.per_stage("weight_units", simulation.num_stages)[0])
    if sends:
        used |= {"latency", "overlap"}
    if (sends and costs.activation_units) or (sized and (fetches or simulation.reductions)):
        used |= {"time_per_unit", "bandwidth"}
    if sized and fetches:
        used |= {"latency", "prefetch", "fetch_contention"}
    if simulation.reductions:
        used |= {"latency", "overlap", "reduce_gradients"}
    if network.workers_per_node > 1 and network.inside is not None:
        inside = {"latency", "time_per_unit", "bandwidth"} & used
        used |= {"workers_per_node", *(f"inside_{name}" for name in inside)}
    return used

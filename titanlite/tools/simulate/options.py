"""Options of a command: which were given, plain numbers, names of output files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from titanlite.tools.options import require_writable
from titanlite.tools.simulate.work import SimulationError

LARGEST = 1e100
LEAST_WIDTH = 30


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which tells which options were given."""

    def error(self, message: str) -> NoReturn:
        raise SimulationError(message.removeprefix("argument "))

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
                    return _chosen_from(list(action.choices))
                return action.type if callable(action.type) else str
        return None


def whole(text: str) -> int:
    """An integer, for an option's type."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


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


def _chosen_from(choices: Collection[str]) -> Callable[[str], str]:
    def choose(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return choose


def check_outputs(options: argparse.Namespace, extensions: Mapping[str, Sequence[str]]) -> None:
    """Raise TitanliteError unless the files of the options in `extensions` can be written."""
    for name, known in extensions.items():
        file = getattr(options, name)
        if file is None:
            continue
        if Path(file).suffix.lower() not in known:
            raise SimulationError(f"--{name}: the name {file!r} must end in {' or '.join(known)}")
        require_writable(file, f"--{name}")

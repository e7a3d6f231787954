"""The options of the commands for jobs of TorchTitan; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from titanlite.errors import ConfigError, quote
from titanlite.tools.options import count
from titanlite.tools.verify.command import VALUES as OF_VERIFY

PREFIX = "torchtitan:"


@dataclass
class Options:
    """The parsed command line; `titan` are TorchTitan's own options."""

    name: str = ""
    titan: list[str] = field(default_factory=list)
    steps: int = 2
    dtype: str = "float64"
    tolerance: float | str | None = None
    ranks: int | None = None
    processes: bool = False
    full: bool = False
    json: str = ""
    junit: str = ""
    rank: int | None = None


def rank_number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"{name}: {quote(text)} is not a rank; give its number")
    return int(text)


VALUES: dict[str, Callable[[str, str], object]] = {
    "--steps": count,
    "--ranks": count,
    **{name: OF_VERIFY[name] for name in ("--dtype", "--tolerance", "--json", "--junit")},
}
FLAGS = ("--processes", "--full")
OF_DEBUG = {"--rank": rank_number}


def parse(arguments: Sequence[str], *, is_debug: bool = False) -> Options:
    """Parse a command line; raises ConfigError for a wrong option of titanlite's."""
    options, rest = Options(), list(arguments)
    values = VALUES | (OF_DEBUG if is_debug else {})
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if name in values:
            if not equals and (not rest or rest[0].startswith("--")):
                raise ConfigError(f"{name}: needs a value; write {name}=value")
            value = values[name](name, text if equals else rest.pop(0))
            setattr(options, name.removeprefix("--"), value)
        elif word in FLAGS:
            setattr(options, name.removeprefix("--"), True)
        elif word.startswith(PREFIX):
            if options.name:
                raise ConfigError(f"{word}: is a second job; give one")
            options.name = word.removeprefix(PREFIX)
        else:
            options.titan.append(word)
    if options.dtype == "bfloat16":
        raise ConfigError("--dtype: bfloat16 says little of a plan; give float64 or float32")
    return options

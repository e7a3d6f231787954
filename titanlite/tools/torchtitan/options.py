"""The options of the commands for jobs of TorchTitan; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from titanlite.errors import ConfigError
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


VALUES: dict[str, Callable[[str, str], object]] = {
    "--steps": count,
    "--ranks": count,
    "--dtype": OF_VERIFY["--dtype"],
    "--tolerance": OF_VERIFY["--tolerance"],
}
FLAGS = ("--processes", "--full")


def parse(arguments: Sequence[str]) -> Options:
    """Parse a command line; raises ConfigError for a wrong option of titanlite's."""
    options, rest = Options(), list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if name in VALUES:
            if not equals and (not rest or rest[0].startswith("--")):
                raise ConfigError(f"{name}: needs a value; write {name}=value")
            value = VALUES[name](name, text if equals else rest.pop(0))
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

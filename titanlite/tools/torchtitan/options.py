"""The options of the commands for jobs of TorchTitan; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.errors import ConfigError
from titanlite.tools.options import positive, rank_number, split_options
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
    hardware: str = ""


VALUES: dict[str, Callable[[str], object]] = {
    "--steps": positive,
    "--ranks": positive,
    **{name: OF_VERIFY[name] for name in ("--dtype", "--tolerance", "--json", "--junit")},
}
FLAGS, DEBUG_FLAGS = ("--processes", "--full"), ("--full",)
OF_DEBUG = {**{n: VALUES[n] for n in ("--steps", "--ranks", "--dtype")}, "--rank": rank_number}
OF_PLAN = {**{n: VALUES[n] for n in ("--ranks", "--json")}, "--hardware": VALUES["--json"]}


def parse(
    arguments: Sequence[str],
    values: Mapping[str, Callable[[str], object]] = VALUES,
    flags: Sequence[str] = FLAGS,
    *,
    text: str,
) -> Options:
    """Parse a command line, whose help is `text`; raises ConfigError for a wrong option."""
    found, words = split_options(arguments, values, flags, text=text)
    options = Options(**found)
    for word in words:
        # split_options takes a word without dashes for the file of a job.
        word = word.removeprefix("--job.config_file=")
        if not word.startswith(PREFIX):
            options.titan.append(word)
        elif options.name:
            raise ConfigError(f"{word}: is a second job; give one")
        else:
            options.name = word.removeprefix(PREFIX)
    if not options.name:
        raise ConfigError(f"{[*options.titan, PREFIX][0]}: is no job's name; give {PREFIX}NAME")
    if options.dtype == "bfloat16":
        raise ConfigError("--dtype: bfloat16 says little of a plan; give float64 or float32")
    return options

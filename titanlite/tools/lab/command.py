"""`titanlite lab` lists the experiments, or runs those named; `titanlite lab exercise` judges.

The options of experiments are the keyword parameters of their functions, as `--name value`. An
option that an experiment does not have is an error, not ignored.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import rich
from rich import box
from rich.table import Table as RichTable

from titanlite.errors import ConfigError, TitanliteError
from titanlite.observe.terminal import folded, telling
from titanlite.tools.lab.exercises.command import main as exercise
from titanlite.tools.lab.experiments import EXPERIMENTS
from titanlite.tools.lab.table import Table
from titanlite.tools.options import CommandParser, choice, fitted, positive

Experiment = Callable[..., Table]

MEANINGS = {
    "world": "number of ranks",
    "num_bytes": "size of the tensor",
    "repeats": "how often to measure",
    "latency_seconds": "latency of the links between ranks",
    "bytes_per_second": "bandwidth of the links between ranks; 0: that of this machine",
    "flops_per_second": "FLOP/s of each device; 0: those of this machine",
    "num_microbatches": "number of microbatches",
    "num_tokens": "number of tokens in the batch or sequence",
    "num_experts": "number of experts",
    "top_k": "experts per token",
    "pp": "number of pipeline stages",
    "x": "devices on the axis x",
    "y": "devices on the axis y",
}


def main(arguments: Sequence[str]) -> int:
    """Run the named experiments. Returns 0, or 1 if one fails; raises ConfigError for misuse.

    If the first argument is "exercise", the others are for exercises/command.py.
    """
    if arguments[:1] == ["exercise"]:
        return exercise(arguments[1:])
    parser = CommandParser(
        prog="titanlite lab",
        description="Distributed training from scratch, on real processes of this machine.",
    )
    which = "names to run, or all; default: list"
    kind = choice([*EXPERIMENTS, "all"], ["exercise"])
    parser.add_argument("experiments", nargs="*", type=kind, metavar="experiment", help=which)
    add_options(parser, EXPERIMENTS)
    options = vars(parser.parse_args(arguments))
    names = options.pop("experiments")
    names = list(EXPERIMENTS) if "all" in names else names
    for name in names:
        require_known(name, EXPERIMENTS[name], options)
    if not names:
        if options:
            raise ConfigError(f"{option(next(iter(options)))}: name an experiment to run")
        rows = (f"  {name:14}{run.__doc__}" for name, run in EXPERIMENTS.items())
        after = """`titanlite lab NAME` runs one, `all` all; docs/lab/ explains them.
`titanlite lab --help` lists their options, `titanlite lab exercise` the exercises."""
        print(fitted("\n".join([*rows, "", after])))
    for name in names:
        try:
            with telling(f"{name}: on real ranks"):
                table = EXPERIMENTS[name](**options)
            show(name, table)
        except TitanliteError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


def show(name: str, table: Table) -> None:
    rich.print(f"\n[bold]{name}[/bold]: {EXPERIMENTS[name].__doc__}\n")
    # Not through rich, which would interpret brackets as markup.
    print(folded(table.caption + "\n", sys.stdout))
    rows = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(table.columns):
        # On a narrow terminal, wrap only wide columns, and headings.
        widest = max(len(line) for row in table.rows for line in row[number].splitlines())
        rows.add_column(column, min_width=widest if widest <= 20 else None)
    for row in table.rows:
        rows.add_row(*(cell.replace("[", "\\[") for cell in row))
    rich.print(rows)


def option(parameter: str) -> str:
    """The option of a parameter: `--bytes` for num_bytes."""
    return "--" + parameter.removeprefix("num_").replace("_", "-")


def parameters(experiment: Experiment) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(experiment).parameters


def add_options(parser: argparse.ArgumentParser, experiments: Mapping[str, Experiment]) -> None:
    """Add every option that an experiment has, with the experiments that have it."""
    users: dict[str, list[str]] = {}
    kinds: dict[str, type] = {}
    for name, experiment in experiments.items():
        for parameter in parameters(experiment).values():
            users.setdefault(parameter.name, []).append(f"{name} ({parameter.default})")
            kinds[parameter.name] = type(parameter.default)
    group = parser.add_argument_group(
        "options of experiments", "in parentheses: the experiments that have one, and its default"
    )
    for name, where in users.items():
        group.add_argument(
            option(name),
            dest=name,
            type=positive if kinds[name] is int else _amount,
            default=argparse.SUPPRESS,
            metavar="N" if kinds[name] is int else "X",
            help=f"{MEANINGS[name]}: {', '.join(where)}",
        )


def require_known(name: str, experiment: Experiment, given: Iterable[str]) -> None:
    """Raise ConfigError for the first option that the experiment does not have."""
    known = parameters(experiment)
    for parameter in given:
        if parameter not in known:
            has = ", ".join(map(option, known)) or "no options"
            raise ConfigError(f"{option(parameter)}: {name} has no such option; it has {has}")


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value

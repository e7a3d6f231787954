"""`titanlite lab` lists the experiments, or runs those named; `titanlite lab exercise` judges."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import rich
from rich import box
from rich.table import Table as RichTable

from titanlite.errors import TitanliteError
from titanlite.ranks.signals import ending_with_the_output
from titanlite.tools.lab.arguments import add_options, option, refused
from titanlite.tools.lab.exercises.command import main as exercise
from titanlite.tools.lab.experiments import EXPERIMENTS
from titanlite.tools.lab.table import Table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named experiments. Returns 0, 1 if one fails, or 2 for an unknown name.

    If the first argument is "exercise", the others are for exercises/command.py.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["exercise"]:
        return exercise(given[1:])
    parser = argparse.ArgumentParser(
        prog="titanlite lab",
        description="Distributed training from scratch, on real processes of this machine.",
    )
    parser.add_argument(
        "experiments", nargs="*", metavar="experiment", help="names to run, or all; default: list"
    )
    add_options(parser, EXPERIMENTS)
    options = vars(parser.parse_args(given))
    names = options.pop("experiments")
    names = list(EXPERIMENTS) if names == ["all"] else names
    for name in names:
        if name not in EXPERIMENTS:
            print(
                f"experiment: there is no {name!r}; use one of {', '.join(EXPERIMENTS)}, or all",
                file=sys.stderr,
            )
            return 2
        if problem := refused(name, EXPERIMENTS[name], options):
            print(problem, file=sys.stderr)
            return 2
    if not names:
        if options:
            print(f"{option(next(iter(options)))}: name an experiment to run", file=sys.stderr)
            return 2
        for name, run in EXPERIMENTS.items():
            print(f"{name:14}{run.__doc__}")
        print("\ntitanlite lab NAME runs one, all runs all; docs/lab/ explains them.")
        print("titanlite lab --help lists their options.")
        print("titanlite lab exercise lists the exercises, which check your own code.")
    for name in names:
        try:
            show(name, EXPERIMENTS[name](**options))
        except TitanliteError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    return 0


def show(name: str, table: Table) -> None:
    rich.print(f"\n[bold]{name}[/bold]: {EXPERIMENTS[name].__doc__}\n")
    # Not through rich, which would interpret brackets as markup.
    print(table.caption + "\n")
    rows = RichTable(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(table.columns):
        # On a narrow terminal, wrap only wide columns.
        widest = max(len(line) for row in table.rows for line in row[number].splitlines())
        rows.add_column(column, no_wrap=widest <= 20)
    for row in table.rows:
        rows.add_row(*(cell.replace("[", "\\[") for cell in row))
    rich.print(rows)


if __name__ == "__main__":
    with ending_with_the_output():
        status = main()
    sys.exit(status)

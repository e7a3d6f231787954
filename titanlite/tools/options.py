"""The options of commands that also take a job's keys, and the files they ask for; torch-free."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from titanlite.errors import ConfigError, quote, suggest
from titanlite.observe.terminal import tell


def split_options(
    arguments: Sequence[str],
    values: Mapping[str, Callable[[str], object]],
    flags: Collection[str] = (),
    *,
    text: str,
) -> tuple[dict[str, Any], list[str]]:
    """The options of a command by attribute name, in their order, and the arguments of its job.

    `values` has the type of each option that has a value, as for a CommandParser. A word without
    dashes is the file of the job. With --help, prints `text` and exits. Raises ConfigError.
    """
    if {"-h", "--help"} & set(arguments):
        print(fitted(text))
        raise SystemExit(0)
    refuse_unknown(arguments, [*values, *flags, "--help"], "")
    found: dict[str, Any] = {}
    job, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        attribute = name.removeprefix("--").replace("-", "_")
        if name in values:
            if not equals:
                if not rest or rest[0].startswith("--"):
                    raise ConfigError(f"{name}: needs a value; write {name}=value")
                value = rest.pop(0)
            try:
                found[attribute] = values[name](value)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{name}: {error}") from None
        elif word in flags:
            found[attribute] = True
        elif not word.startswith("--"):
            job.append(f"--job.config_file={word}")
        else:
            job.append(word)
            # In "--section.key value" the value is not a config file.
            if not equals and rest and not rest[0].startswith("--") and "." in name:
                job.append(rest.pop(0))
    return found, job


def fitted(text: str) -> str:
    """A help in lines that fit a terminal; what a word is for stays in its column."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    lines = []
    for line in re.sub(r"(?<=\S)\n(?: {20,}|(?=\S))", " ", _as_typed(text)).split("\n"):
        begin = re.match(r"  --\S+(?: [A-Z]\S*)? +|  \w[\w-]* +|usage: | +\$ | {7,}|", line)
        after = " " * len(begin[0] if begin else "")
        lines += textwrap.wrap(line, width, subsequent_indent=after, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def program() -> str:
    """What was typed to run this: "titanlite", or "python -m titanlite"."""
    is_module = Path(sys.argv[0]).parts[-2:] == ("titanlite", "__main__.py")
    return "python -m titanlite" if is_module else "titanlite"


def _as_typed(text: str) -> str:
    """A text whose commands begin as this one did."""
    return re.sub(r"(^|usage: | {7}|`|\$ )titanlite ", rf"\1{program()} ", text)


def refuse_unknown(
    words: Iterable[str], known: Iterable[str], otherwise: str = "see --help"
) -> None:
    """Raise ConfigError for the first option in `words` that is not `known`.

    Without `otherwise`, only if it is spelled like one: the others are keys of a job.
    """
    names = [one.lstrip("-") for one in known]
    for name in (found[1] for word in words if (found := re.match(r"--([^ =]+)(=|$)", word))):
        meant = suggest(name, names, otherwise, "--{}".format)
        if name not in names and meant and (otherwise or "." not in name):
            raise ConfigError(f"--{name}: there is no such option; {meant}")


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which says what a misspelled word means."""

    def __init__(self, prog: str, usage: str = "", **more: Any) -> None:
        usage = usage and fitted(f"usage: {usage}").removeprefix("usage: ")
        super().__init__(_as_typed(prog), usage or None, **more)

    def format_help(self) -> str:
        # Options are listed below it: in the usage, they would take up to 15 lines.
        words = ["usage:", self.prog]
        for one in self._actions:
            name = "|".join(one.choices or ()) or str(one.metavar or one.dest)
            if one.required or not one.option_strings:
                name = {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(one.nargs), name)
                words += [*one.option_strings, name]
        self.usage = self.usage or fitted(" ".join([*words, "[options]"])).partition(" ")[2]
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        action.type = choice(action.choices) if action.choices else action.type
        return super()._get_value(action, text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        refuse_unknown(args, self._option_string_actions, "")
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        refuse_unknown(args, self._option_string_actions)
        return super().parse_args(args, namespace)


def choice(known: Iterable[str], more: Iterable[str] = ()) -> Callable[[str], str]:
    """The type of an option of a CommandParser that is one of `known`; advises those and `more`."""

    def choose(text: str) -> str:
        if text in known:
            return text
        advice = suggest(text, [*known, *more], f"choose from {', '.join(known)}")
        raise argparse.ArgumentTypeError(f"there is no {text!r}; {advice}")

    return choose


def whole(text: str) -> int:
    """An integer, for the type of an option of a CommandParser."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def positive(text: str, least: int = 1) -> int:
    """A number of at least 1, or `least`, for the type of an option of a CommandParser."""
    if whole(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return whole(text)


rank_number: Callable[[str], int] = partial(positive, least=0)


def require_writable(path: str, option: str) -> None:
    """Raise ConfigError before a run if the file `path` of `option` could not be written after it.

    So no result is lost.
    """
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    if Path(path).is_dir():
        raise ConfigError(f"{option}: {quote(path)} is a folder; give a file")
    is_old = Path(path).exists() and not os.access(path, os.W_OK)
    if is_old or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option}: {quote(path)} cannot be written; give another file")


def write(path: str | Path, content: str | Callable[[Path], None]) -> str:
    """Write the file `path`: a text, or by `content(path)`; returns a line to print.

    Makes its folder. Raises ConfigError. A command writes its files before it prints: what reads
    its output may close it early, as `head` does.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            content(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}); give another file"
        ) from error
    return f"wrote {path}"


def counting_bar() -> Any:
    """A bar with "n/total" and the time, on stderr; it shows nothing if that is no terminal."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    text = progress.TextColumn("[progress.description]{task.description}")
    more = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
    return progress.Progress(text, *more, console=console, disable=not console.is_terminal)


def say(text: str) -> None:
    """Print a text inside `telling`."""
    tell("", "\r")
    print(text, flush=True)

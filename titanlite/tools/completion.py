"""`titanlite completion bash`: a script with which a shell completes commands, options and keys.

The words are those of the commands' own help and of the keys of a job. They stand in the script
(completion.bash, which zsh can run too), so that completing a word starts no Python.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from titanlite.config.keys import Key, job_keys
from titanlite.registry import DATASETS, MODELS
from titanlite.schedule import SCHEDULES
from titanlite.tools.options import CommandParser

REGISTERED = {
    "--model.name": MODELS,
    "--training.dataset": DATASETS,
    "--parallelism.pipeline_parallel_schedule": SCHEDULES,
}
Words = dict[str, list[str]]  # what may follow a command or an option
SHELLS = ("bash", "zsh", "fish")
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def show(
    arguments: Sequence[str], commands: Mapping[str, Any], run: Callable[[Sequence[str]], int]
) -> int:
    """Print the script for `commands` (titanlite/cli.py), which `run` runs; returns the status."""
    parser = CommandParser(
        prog="titanlite completion",
        description="Print a script with which a shell completes commands, options, TOML files and "
        "the keys of a job. docs/start/install.md says where it goes.",
    )
    parser.add_argument("shell", choices=SHELLS)
    shell = parser.parse_args(arguments).shell

    def help_of(*words: str) -> str:
        with redirect_stdout(io.StringIO()) as text, suppress(SystemExit):
            run([*words, "--help"])
        return text.getvalue()

    texts = {name: help_of(name) for name in commands}
    options = {}
    for name, command in commands.items():
        within = command.within and help_of(name, command.within)
        options[name] = [*_words(command), *_options(texts[name] + within)]
    jobs = [name for name, text in texts.items() if "--section.key" in text]
    found = re.findall(r"(--[\w-]+) \{(.+?)\}", "".join(texts.values()))
    values = {option: choices.split(",") for option, choices in found}
    keys = {f"--{key.name}": key for key in job_keys().values() if key.is_live}
    for option, key in keys.items():
        if choices := key.choices or ("true", "false") * (key.type is bool):
            values[option] = list(choices)
    values |= {option: list(names) for option, names in REGISTERED.items()}
    draw = _fish if shell == "fish" else _bash
    print(ZSH * (shell == "zsh") + draw(options, jobs, keys, values))
    return 0


def _words(command: Any) -> list[str]:
    module, _, table = command.words.partition(":")
    words = list(getattr(import_module(module), table)) if table else []
    return [*words, command.within] if command.within not in ("", *words) else words


def _options(text: str) -> list[str]:
    """The options in a help, but not the keys of a job."""
    options = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text))
    is_of_jobs = "--section.key" in text
    return sorted({"--help", *(o for o in options if not (is_of_jobs and "." in o))})


def _bash(options: Words, jobs: list[str], keys: dict[str, Key], values: Words) -> str:
    def joined(words: Iterable[str], end: str = " ") -> str:
        return "\n".join(word + end for word in words)

    def cases(tables: Words) -> str:
        return "\n".join(f"{name}) words='{joined(of)}' ;;" for name, of in tables.items())

    script = Path(__file__).with_suffix(".bash").read_text()
    for name, text in {
        "commands": joined(options),
        "options": cases(options),
        "values": cases(values),
        "jobs": "|".join(jobs),
        "keys": joined(keys, "="),
    }.items():
        script = script.replace(f"@{name}@", text)
    return script.rstrip()


def _fish(options: Words, jobs: list[str], keys: dict[str, Key], values: Words) -> str:
    begin = "complete -c titanlite -n"
    lines = [f"{begin} __fish_use_subcommand -f -a {name}" for name in options]
    files = "(__fish_complete_suffix .toml)"
    for commands, words in {**options, " ".join(jobs): [*keys, files]}.items():
        for word in words:
            what = f"-l {word[2:]}" if word.startswith("--") else f"-k -a '{word}'"
            if word in keys or word in values:
                what += f" -x -a '{' '.join(values.get(word, ()))}'"
            about = keys[word].text.replace("'", r"\'") if word in keys else ""
            condition = f"'__fish_seen_subcommand_from {commands}'"
            lines.append(f"{begin} {condition} {what} -d '{about}'")
    return "\n".join(lines)

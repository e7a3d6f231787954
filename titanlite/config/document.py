"""The schema as text: --help, and a whole configuration as TOML."""

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from titanlite.config.keys import Key, job_keys, job_sections
from titanlite.config.model import make_model_config
from titanlite.config.schema import JobConfig
from titanlite.config.toml import show
from titanlite.errors import ConfigError, suggest

USAGE = """\
examples:
  $ {example}
  $ {program} --help parallelism

usage: {program} {file} [--section.key=VALUE ...]

A job is a TOML file. Options override its keys: --training.steps=100 or --training.steps 100; \
--compile.enable, or =true, or =false; --compile.components=model,loss. The value none unsets a \
key. `--help SECTION` lists the keys of a section, and `--help all` those of all sections:
"""

SECTION_WIDTH = 24
LEFT_WIDTH = 36  # of the column that holds key and default
GLUE = "\0"  # a space without a line break


def help_text(own_keys: Mapping[str, Key], example: str, asked: str = "") -> str:
    """The text of --help: the sections, or if `asked`, the keys of one, of one key, or of "all".

    `own_keys` are the keys of the model's own configuration; `example` is a command with a file.
    Raises ConfigError if there is no section or key `asked`.
    """
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
    sections = job_sections()
    lines: list[str] = []
    if not asked or asked.endswith(".toml"):
        start, _, file = example.rpartition(" ")
        option, equals, _ = file.rpartition("=")
        text = USAGE.format(example=example, program=start, file=f"{option}{equals}FILE")
        for name in dict.fromkeys(key.section for key in job_keys().values() if key.is_live):
            about = (sections[name].__doc__ or "").partition(". ")[0]
            text += f"\n  {name:<{SECTION_WIDTH}}{about}"
        for line in text.split("\n"):
            indent = re.sub(r"(  \S+ +|usage: |).*", lambda m: " " * len(m[1]), line)
            lines += [textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)]
        return "\n".join(lines)

    live = (key for key in (*job_keys().values(), *own_keys.values()) if key.is_live)
    for section, keys in by_section(
        key for key in live if asked == "all" or f"{key.name}.".startswith(f"{asked}.")
    ):
        lines.append(f"[{section}]  {sections[section].__doc__}")
        for key in keys:
            lines += _help_lines(key, width, is_own=key.name in own_keys)
        lines.append("")
    if not lines:
        advice = suggest(asked, [*sections, *job_keys()], "see --help for all sections")
        raise ConfigError(f"--help: there is no section {asked!r}; {advice}")
    return "\n".join(lines).rstrip()


def _help_lines(key: Key, width: int, is_own: bool = False) -> Iterator[str]:
    if is_own:
        left = f"  {key.leaf}  (the flavor's)"
    elif key.default is None:
        left = f"  {key.leaf}  (not set)"
    else:
        left = f"  {key.leaf} = {show(key.default)}"
    if len(left) >= LEFT_WIDTH:
        yield left
        left = ""
    kind = f"({key.type_name()})"
    if len(kind) < 24:
        kind = kind.replace(" ", GLUE)
    for line in textwrap.wrap(f"{key.text} {kind}", width - LEFT_WIDTH - 1):
        yield f"{left:<{LEFT_WIDTH}} {line.replace(GLUE, ' ')}"
        left = ""


def by_section(keys: Iterable[Key]) -> list[tuple[str, list[Key]]]:
    groups: dict[str, list[Key]] = {}
    for key in keys:
        groups.setdefault(key.section, []).append(key)
    return list(groups.items())


def format_config(config: JobConfig) -> str:
    """The whole configuration as TOML, which can be used as a job file.

    It contains the resolved sizes of the model and the resolved warm-up. It omits keys that are not
    set, and keys of features that titanlite does not have.
    """
    model = make_model_config(config)
    sizes = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    lines = []
    for section, keys in by_section(key for key in job_keys().values() if key.is_live):
        part: Any = config
        for name in section.split("."):
            part = getattr(part, name)
        values = {key.leaf: getattr(part, key.leaf) for key in keys}
        if section == "model":
            values |= sizes
        if section == "lr_scheduler" and "warmup_steps" not in config.lr_scheduler.model_fields_set:
            values["warmup_steps"] = config.warmup_steps
        lines.append(f"[{section}]")
        lines += [f"{leaf} = {show(value)}" for leaf, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)

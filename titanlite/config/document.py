"""The schema as text: --help, docs/configuration.md, and a whole configuration as TOML.

`python -m titanlite.config.document > docs/configuration.md` regenerates the document.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from titanlite.config.checks import CHECKS
from titanlite.config.keys import Key, job_keys, job_sections, model_keys
from titanlite.config.model import make_model_config
from titanlite.config.schema import JobConfig
from titanlite.config.toml import show
from titanlite.fields import OWN
from titanlite.registry import MODELS

USAGE = """\
usage: torchrun train.py --job.config_file=FILE [--section.key=VALUE ...]

A job is a TOML file. Options override its keys: --training.steps=100 or --training.steps 100;
--compile.enable, or =true, or =false; --compile.components=model,loss. The value none unsets a
key. The keys, with default, purpose and type:
"""

ABSENT = "TorchTitan keys that titanlite does not have; only the value shown is accepted:"
IDLE = "Keys that configure those features; any value is accepted and has no effect:"

LEFT_WIDTH = 36  # of the column that holds key and default
GLUE = "\0"  # a space without a line break


def help_text(own_keys: Mapping[str, Key]) -> str:
    """The text of --help; `own_keys` are the keys of the model's own configuration."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 72), 120)
    lines = [USAGE]
    for section, keys in _by_section(key for key in job_keys().values() if key.is_live):
        lines.append(f"[{section}]  {job_sections()[section].__doc__}")
        for key in keys + (list(own_keys.values()) if section == "model" else []):
            lines += _help_lines(key, width, is_own=key.name in own_keys)
        lines.append("")
    for title, absent in (
        (ABSENT, [key for key in job_keys().values() if key.not_yet]),
        (IDLE, [key for key in job_keys().values() if key.inert]),
    ):
        lines += [title, ""]
        for section, keys in _by_section(absent):
            lines.append(f"[{section}]")
            for key in keys:
                lines += _help_lines(key, width)
            lines.append("")
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


def _by_section(keys: Iterable[Key]) -> list[tuple[str, list[Key]]]:
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
    for section, keys in _by_section(key for key in job_keys().values() if key.is_live):
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


def markdown() -> str:
    """The text of docs/configuration.md."""
    keys = list(job_keys().values())
    live = [key for key in keys if key.is_live]
    parts = [HEAD]
    for section, members in _by_section(live):
        parts.append(f"### [{section}]\n\n{job_sections()[section].__doc__}.\n")
        parts.append(_table(("key", "default", "type", "what it does"), map(_row, members)))
        if section == "model":
            parts.append(_models())
    parts.append("## Checks across keys\n")
    parts.append(CHECKED)
    parts.append("\n".join(f"- {_sentence(check.purpose)}" for check in CHECKS) + "\n")
    parts.append("## Where titanlite differs from TorchTitan\n\n### Defaults\n")
    differ = [key for key in live if key.torchtitan not in (..., OWN)]
    rows = ((f"`{k.name}`", _default(k.default), _default(k.torchtitan), k.text) for k in differ)
    parts.append(_table(("key", "titanlite", "TorchTitan", "what it does"), rows))
    parts.append("### Keys that TorchTitan does not have\n")
    own = [f"- `{key.name}`: {key.text}" for key in live if key.torchtitan is OWN]
    parts.append("\n".join(own) + "\n")
    parts.append(f"### Keys that titanlite does not have\n\n{LACKS}")
    lacking = (
        (f"`{k.name}`", " or ".join(map(_default, _accepted(k))), k.text) for k in keys if k.not_yet
    )
    parts.append(_table(("key", "accepted at", "what it does in TorchTitan"), lacking))
    parts.append(f"### Keys without effect\n\n{NO_EFFECT}")
    idle = ((f"`{k.name}`", _default(k.default), k.text) for k in keys if k.inert)
    parts.append(_table(("key", "default", "what it does in TorchTitan"), idle))
    return "\n".join(parts).rstrip() + "\n"


HEAD = """\
# Configuration

<!-- Generated by: python -m titanlite.config.document > docs/configuration.md -->

A job is one TOML file. The command line overrides it. Keys that are in neither have the defaults
below:

```
torchrun train.py --job.config_file=configs/tp2_fsdp2.toml --training.steps=100
```

- `--section.key=value` and `--section.key value` are the same. A boolean is set by `=true` or
  `=false`; without a value it is true. A list is `=model,loss` or `='["model", "loss"]'`. `=none`
  unsets a key. If a key is given several times, the last value is used.
- Sections, keys and meanings are those of TorchTitan v0.2.2. A TorchTitan file works after changing
  the model, the data set and the [keys that titanlite does not
  have](#keys-that-titanlite-does-not-have).
- A file is always required: `train.py` and `titanlite verify` have no default job.
- A run may be shorter than its warm-up. As in TorchTitan, the warm-up is cut to `training.steps`
  first, then the decay to the steps that are left. The startup output shows both.
- Types are not converted: `steps = "10"`, `steps = 10.0` and `steps = true` are refused. An integer
  is accepted as a number.
- All mistakes in a job are reported together, before torch is imported and before any process
  starts, one line each: `section.key: what is wrong; what to do`. The exit status is 2.
- `--help` prints the same keys. `--job.print_config=true` prints all values of a job as TOML, and
  `--job.save_config_file=job.toml` writes them to a file in `job.dump_folder`.

## Keys
"""

CHECKED = """\
The product of the degrees in [parallelism] must be the number of ranks. With
`data_parallel_shard_degree = -1`, that degree is the number of ranks divided by the other degrees.
A job that is started as a single process starts as many local ranks as its degrees need; -1 is then
1 on CPU, and on CUDA the number of GPUs divided by the other degrees. At most 32 ranks per core and
one per 150 MB of memory are started; `job.max_local_ranks` sets another limit. Ranks on CPU whose
parameters, gradients and optimizer state alone exceed the machine's memory are not started;
`job.max_local_memory_gb` sets another limit.

Besides the type and range of each key, these rules are checked when the job is read, or as soon as
the number of ranks is known.
"""

LACKS = """\
TorchTitan files may contain these keys at TorchTitan's default, which turns nothing on. Any other
value is refused, and the error names the key.
"""

NO_EFFECT = """\
These keys configure features that titanlite does not have: the overlap of a pipeline with expert
communication, converters other than `quantize.linear.float8`, fault tolerance, and estimating
memory with real tensors. The values that turn these features on (of `model.converters` and
`fault_tolerance.enable`) are refused, as is `memory_estimation.disable_fake_mode` while
`memory_estimation.enable` is true. While a feature is off, its keys have no effect in TorchTitan
either, so any value is accepted. A line at the start of the run lists those of these keys that are
set.
"""


def _models() -> str:
    parts = []
    for spec in MODELS.values():
        flavors = spec.load_flavors()
        keys = model_keys(spec.load_config_class())
        parts.append(
            f"Keys of the model `{spec.name}`, and their values in its flavors. Your own model, "
            "registered by `experimental.custom_import`, has its own keys.\n"
        )
        rows = (
            (
                f"`{key.leaf}`",
                *(_default(getattr(flavor, key.leaf)) for flavor in flavors.values()),
                key.type_name(),
                key.text,
            )
            for key in keys.values()
        )
        heads = ("key", *(f"`{name}`" for name in flavors), "type", "what it is")
        parts.append(_table(heads, rows))
    return "\n".join(parts)


def _row(key: Key) -> tuple[str, ...]:
    return f"`{key.leaf}`", _default(key.default), key.type_name(), key.text


def _accepted(key: Key) -> list[object]:
    return [key.default] if key.torchtitan is ... else [key.default, key.torchtitan]


def _default(value: object) -> str:
    return "not set" if value is None else f"`{show(value)}`"


def _sentence(text: str | None) -> str:
    return " ".join((text or "").split())


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *([cell.replace("|", "\\|") for cell in r] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")

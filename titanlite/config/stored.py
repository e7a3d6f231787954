"""A configuration that came with a checkpoint or a file of weights: data, of which no key that
imports a module, opens a path or starts a process is used; torch-free.

What it may say is which model it is, in which number format, and how samples are drawn. The keys in
ASKED are for the user alone to give; where a stored configuration has one, the user is told so.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.config.keys import job_keys
from titanlite.config.toml import quote
from titanlite.errors import ConfigError
from titanlite.files import shown

# Of each section the keys that are used; of [model] also those of the model's own configuration,
# which has typed fields.
DATA: Mapping[str, tuple[str, ...]] = {
    "job": ("description",),
    "model": ("name", "flavor"),
    "training": ("dataset", "seq_len", "dtype", "mixed_precision_param", "mixed_precision_reduce"),
    "sampling": ("num_samples", "temperature"),
    "debug": ("seed", "deterministic", "deterministic_warn_only"),
}
ASKED = {
    "experimental.custom_import": "a module that registers the model",
    "training.dataset_path": "a folder of data",
}
MOST_DESCRIPTION_CHARACTERS = 200


def stored_sections(
    stored: Mapping[str, Mapping[str, Any]], source: Path, given: Mapping[str, str | None]
) -> dict[str, dict[str, Any]]:
    """The sections of a stored configuration as data, with what the user has `given` of ASKED.

    Raises ConfigError where the configuration in `source` has one of ASKED and the user has not
    given it: no module is imported and no path opened because a file says so.
    """
    problems = []
    for name, what in ASKED.items():
        section, key = name.split(".")
        wanted = stored.get(section, {}).get(key)
        if wanted and not given.get(name):
            problems.append(
                f"{name}: {source} names {what}, {quote(shown(str(wanted)))}, which is not used "
                f"because a file says so; if you trust it, {_how_to_give(name, wanted)}"
            )
    if problems:
        raise ConfigError(*problems)
    sections = {
        section: {
            key: value
            for key, value in stored.get(section, {}).items()
            if key in keys or (section == "model" and f"model.{key}" not in job_keys())
        }
        for section, keys in DATA.items()
    }
    description = sections["job"].get("description")
    if isinstance(description, str):
        sections["job"]["description"] = shown(description, MOST_DESCRIPTION_CHARACTERS)
    for name, value in given.items():
        if value:
            section, key = name.split(".")
            sections.setdefault(section, {})[key] = value
    return sections


def _how_to_give(name: str, wanted: Any) -> str:
    """What to type; a text that is neither a module nor a plain path is not handed on."""
    if not isinstance(wanted, str) or not wanted.isprintable() or len(wanted) > 200:
        return f"give --{name}"
    if name == "experimental.custom_import" and not all(
        part.isidentifier() for part in wanted.split(".")
    ):
        return f"give --{name}"
    return f"give --{name}={shlex.quote(wanted)}"

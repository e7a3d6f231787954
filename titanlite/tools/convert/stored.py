"""What a command takes from a checkpoint or a file of weights: its configuration; torch-free.

A stored configuration is untrusted: keys that import a module, open a path or start a process are
not used. It may only define the model, its number format, and how samples are drawn (DATA). If it
has a key of ASKED, the user must give the value.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.checkpoint.folder import CheckpointFolder, look_at
from titanlite.checkpoint.manifest import MANIFEST, Manifest
from titanlite.config.keys import job_keys
from titanlite.errors import ConfigError, quote
from titanlite.files import shown
from titanlite.registry import DATASETS

# Section -> the keys that are used. The keys of the model's own configuration are used too: its
# fields are typed.
DATA: Mapping[str, tuple[str, ...]] = {
    "job": ("description",),
    "model": ("name", "flavor"),
    "training": ("dataset", "seq_len", "dtype", "mixed_precision_param", "mixed_precision_reduce"),
    "lora": ("rank", "alpha", "target_modules"),
    "sampling": ("num_samples", "temperature", "top_k", "top_p", "num_tokens"),
    "debug": ("seed", "deterministic", "deterministic_warn_only"),
}
ASKED = {
    "experimental.custom_import": "a module that registers the model",
    "training.dataset_path": "a folder of data",
    "model.hf_assets_path": "a folder with a tokenizer",
    "model.path": "a folder with the sizes of the model",
}
MOST_DESCRIPTION_CHARACTERS = 200


def find_checkpoint(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint at `path`, or the newest one with a valid manifest in the folder `path`.

    Raises ConfigError if there is none.
    """
    found = look_at(path)
    if found.manifest is None and not (path / MANIFEST).exists():
        newest = [one for one in CheckpointFolder(path).newest_first() if one.manifest]
        if not newest:
            advice = "give a step-N folder"
            if (path / "config.json").is_file():
                advice = "make one of this Hugging Face folder: `titanlite convert "
                advice += f"{path} --out step-0 --model llama3`"
            raise ConfigError(f"{path} is neither a checkpoint nor a folder of them; {advice}")
        found = newest[0]
    if found.manifest is None:
        raise ConfigError(f"{path} cannot be used: {found.reason}; give another checkpoint")
    if found.manifest.stored_as == "peft":
        raise ConfigError(
            f"{found.path} has only adapters, in peft's format already; load it with peft, or end "
            "the run with lora.save_merged = true"
        )
    return found.path, found.manifest


def stored_sections(
    stored: Mapping[str, Mapping[str, Any]], source: Path, given: Mapping[str, str | None]
) -> dict[str, dict[str, Any]]:
    """The trusted sections of a stored configuration, and the keys of ASKED that were `given`.

    Raises ConfigError if the configuration in `source` has a key of ASKED that the user has not
    given: a file alone must not cause a module to be imported or a path to be opened. Data whose
    files are not needed for sampling are replaced by others of their kind.
    """
    data = DATASETS.get(str(stored.get("training", {}).get("dataset")))
    if data is not None and data.sampled_as is not None and not given.get("training.dataset_path"):
        training = {**stored["training"], "dataset": data.sampled_as, "dataset_path": None}
        stored = {**stored, "training": training}
    if data is None or not data.reads_tokenizer:
        stored = {**stored, "model": {**stored.get("model", {}), "hf_assets_path": None}}
    problems = []
    for name, what in ASKED.items():
        section, key = name.split(".")
        wanted = stored.get(section, {}).get(key)
        if wanted and not given.get(name):
            problems.append(
                f"{name}: {source} names {what}, {quote(shown(str(wanted)))}, which is not used "
                f"without your consent; if you trust it, {_how_to_give(name, wanted)}"
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
    """The option to give, with the value only if that is a module name or a plain path."""
    if not isinstance(wanted, str) or not wanted.isprintable() or len(wanted) > 200:
        return f"give --{name}"
    if name == "experimental.custom_import" and not all(
        part.isidentifier() for part in wanted.split(".")
    ):
        return f"give --{name}"
    return f"give --{name}={shlex.quote(wanted)}"

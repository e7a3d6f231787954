"""Data sets that the package `datasets` of Hugging Face loads. No torch.

`datasets` finds a data set in its cache, in a local folder or on the Hub, and writes each split as
Arrow files to its cache. titanlite reads these files like any others, so a sample stays a function
of seed and index; nothing is streamed. HF_HUB_OFFLINE, HF_HOME and the other variables of the
package apply.
"""

import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlite.errors import ConfigError
from titanlite.files import read_bytes, shown

MOST_RECORD_BYTES = 64 << 20


def arrow_files(
    source: str, split: str, key: str, dump_folder: str, *, refresh: bool
) -> list[Path]:
    """The Arrow files of a split of `source`: NAME or NAME:CONFIGURATION, or a local folder.

    The files that were found are recorded in `dump_folder`. Without `refresh`, that record is used
    if its files still exist, so that the ranks read what was prepared for them, and need not load
    the package. Raises ConfigError, which names `key`, if the data set cannot be loaded.
    """
    digest = hashlib.sha256(repr((source, split)).encode()).hexdigest()[:16]
    record = Path(dump_folder).absolute() / "data" / f"datasets-{digest}.json"
    if not refresh and (known := _recorded(record)) is not None:
        return known
    files = _load(source, split, key)
    _write(record, files)
    return files


def _load(source: str, split: str, key: str) -> list[Path]:
    by_folder = f"give a folder of files as {key.partition('.')[0]}.dataset_path"
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"{key}: loading {shown(source)} needs the package datasets, which is not installed; "
            f'pip install "titanlite[datasets]", or {by_folder}'
        )
    import datasets

    folder = Path(source).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            saved: Any = datasets.load_from_disk(str(folder), keep_in_memory=False)
            found: Any = saved[split] if isinstance(saved, Mapping) else saved
        else:
            name, _, configuration = source.partition(":")
            path, of_name = (str(folder), None) if folder.is_dir() else (name, configuration)
            found = datasets.load_dataset(
                path, name=of_name or None, split=split, keep_in_memory=False
            )
    except Exception as error:  # the package raises many kinds
        why = shown(" ".join(str(error).split()), most_characters=200)
        is_network = isinstance(error, ConnectionError)
        change = "load it once where there is a network" if is_network else "correct its name"
        raise ConfigError(
            f"{key}: the package datasets cannot load the split {split} of {shown(source)} "
            f"({type(error).__name__}: {why}); {change}, or {by_folder}"
        ) from error
    if "text" not in found.column_names:
        names = ", ".join(map(shown, found.column_names))
        raise ConfigError(
            f"{key}: {shown(source)} has no column `text`, but {names}; rename the column of the "
            "text, save the data set, and give its folder"
        )
    return [Path(file["filename"]) for file in found.cache_files]


def _recorded(record: Path) -> list[Path] | None:
    try:
        files = list(map(Path, json.loads(read_bytes(record, most_bytes=MOST_RECORD_BYTES))))
    except (OSError, ValueError, TypeError):
        return None
    return files if files and all(file.is_file() for file in files) else None


def _write(record: Path, files: list[Path]) -> None:
    new = record.with_name(f"{record.name}.new-{os.getpid()}")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps([str(file) for file in files]), encoding="utf-8")
        new.rename(record)
    except OSError:
        # Each rank loads the data set itself then.
        new.unlink(missing_ok=True)

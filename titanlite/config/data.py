"""Whether a data set is there, and whether the model takes its images."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config.keys import one_of
from titanlite.config.model import load_model_spec
from titanlite.config.schema import JobConfig
from titanlite.config.toml import quote
from titanlite.data.catalog import CATALOG

TORCHTITAN_DATASETS = (
    *("c4", "c4_test", "c4_validation"),
    *("cc12m-wds", "cc12m-test", "coco-validation"),
)


def source_problems(section: str, dataset: str, path: str | None) -> Iterator[str]:
    """What is wrong with the name of a data set, or with its folder, as `section` gives them."""
    info = CATALOG.get(dataset)
    name = quote(dataset)
    if dataset in TORCHTITAN_DATASETS:
        yield (
            f"{section}.dataset: {name} is a TorchTitan data set that titanlite does not have; "
            f"give {one_of(map(quote, CATALOG))}"
        )
    elif info is None:
        match = difflib.get_close_matches(dataset, CATALOG, n=1)
        advice = (
            f"did you mean {quote(match[0])}?" if match else f"give {one_of(map(quote, CATALOG))}"
        )
        yield f"{section}.dataset: there is no data set {name}; {advice}"
    elif info.needs_path and path is None:
        yield f"{section}.dataset_path: not set, and {name} is read from disk; give its folder"
    elif info.needs_path and path is not None and not Path(path).expanduser().is_dir():
        yield f"{section}.dataset_path: {quote(path)} is not a folder; give the folder of {name}"
    elif not info.needs_path and path is not None:
        yield f"{section}.dataset_path: {name} is not read from a folder; leave this key out"


def fit_problems(section: str, dataset: str, config: JobConfig, model: Any) -> Iterator[str]:
    """What of the data set's images and pixel values the model does not take."""
    changes = _changes_for(dataset, model)
    if not changes:
        return
    info = CATALOG[dataset]
    fitting = [quote(name) for name in CATALOG if not _changes_for(name, model)]
    ways = [f"{section}.dataset to {one_of(fitting)}"] if fitting else []
    if section == "training":
        flavors = load_model_spec(config).load_flavors()
        whole = [quote(name) for name in flavors if not _changes_for(dataset, flavors[name])]
        if whole and not config.model.overrides:
            ways.append(f"model.flavor to {one_of(whole)}")
        else:
            ways.append(", ".join(changes))
    yield (
        f"{section}.dataset: {quote(dataset)} has images of {info.size} and {info.vocab_size} "
        f"values, the model takes {shape_of(model)} and {model.vocab_size}; "
        f"set {', or '.join(ways)}"
    )


def _changes_for(dataset: str, model: Any) -> list[str]:
    """What the sizes of `model` would have to be for `dataset`, where they are not."""
    info = CATALOG.get(dataset)
    if info is None:
        return []
    needed = (
        ("image_height", info.height),
        ("image_width", info.width),
        ("image_channels", info.channels),
    )
    changes = [
        f"model.{field} to {size}"
        for field, size in needed
        if size not in (None, getattr(model, field))
    ]
    changes += [
        f"model.{field} to at most {limit}"
        for field, limit in (("image_height", info.max_height), ("image_width", info.max_width))
        if limit is not None and getattr(model, field) > limit
    ]
    if info.vocab_size is not None and model.vocab_size < info.vocab_size:
        changes.append(f"model.vocab_size to {info.vocab_size}")
    return changes


def shape_of(model: Any) -> str:
    """The images that the model takes, in words: height x width x channels."""
    return f"{model.image_height} x {model.image_width} x {model.image_channels}"

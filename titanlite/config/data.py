"""Check that a data set exists and fits the model; torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config.keys import one_of
from titanlite.config.model import load_model_spec
from titanlite.config.schema import JobConfig
from titanlite.config.toml import quote
from titanlite.data.catalog import DATASETS
from titanlite.data.spec import Misfit

TORCHTITAN_DATASETS = (
    *("c4", "c4_test", "c4_validation"),
    *("cc12m-wds", "cc12m-test", "coco-validation"),
)


def source_problems(section: str, dataset: str, path: str | None) -> Iterator[str]:
    """The problems of the data set name and folder that `section` gives."""
    info = DATASETS.get(dataset)
    name = quote(dataset)
    if dataset in TORCHTITAN_DATASETS:
        yield (
            f"{section}.dataset: {name} is a TorchTitan data set that titanlite does not have; "
            f"give {one_of(map(quote, DATASETS))}"
        )
    elif info is None:
        match = difflib.get_close_matches(dataset, DATASETS, n=1)
        advice = (
            f"did you mean {quote(match[0])}?" if match else f"give {one_of(map(quote, DATASETS))}"
        )
        yield f"{section}.dataset: there is no data set {name}; {advice}"
    elif info.needs_path and path is None:
        yield f"{section}.dataset_path: is not set, but {name} is read from disk; give its folder"
    elif info.needs_path and path is not None and not Path(path).expanduser().is_dir():
        yield f"{section}.dataset_path: {quote(path)} is not a folder; give the folder of {name}"
    elif not info.needs_path and path is not None:
        yield f"{section}.dataset_path: {name} is not read from a folder; remove this key"


# TorchTitan's default of training.seq_len, if neither model nor data set fixes the length.
DEFAULT_SEQ_LEN = 2048


def sequence_length(config: JobConfig, model: Any) -> int:
    """Tokens in a sequence: set by the model, else the job, else the data, else DEFAULT_SEQ_LEN.

    A sample without tokens counts as one.
    """
    spec = DATASETS.get(config.training.dataset)
    if spec is not None and not spec.has_tokens:
        return own_length(model) or 1
    lengths = (
        own_length(model),
        config.training.seq_len,
        None if spec is None else spec.seq_len(model),
    )
    return next((length for length in lengths if length is not None), DEFAULT_SEQ_LEN)


def own_length(model: Any) -> int | None:
    """The fixed sequence length of a model of these sizes; None if it takes any length."""
    return getattr(model, "seq_len", None)


def fit_problems(
    section: str, dataset: str, config: JobConfig, model: Any, seq_len: int
) -> Iterator[str]:
    """Why the model cannot read the data set, with the changes that would help."""
    misfit = _misfit(dataset, model, seq_len)
    if misfit is None:
        return
    fitting = [quote(name) for name in DATASETS if not _misfit(name, model, seq_len)]
    ways = [f"{section}.dataset to {one_of(fitting)}"] if fitting else []
    if section == "training":
        flavors = load_model_spec(config).load_flavors()
        whole = [
            quote(name)
            for name, flavor in flavors.items()
            if not _misfit(dataset, flavor, sequence_length(config, flavor))
        ]
        if whole and not config.model.overrides:
            ways.append(f"model.flavor to {one_of(whole)}")
        elif misfit.changes:
            ways.append(", ".join(misfit.changes))
    yield (
        f"{section}.dataset: {quote(dataset)} has {misfit.has}, but the model takes "
        f"{misfit.takes}; " + (f"set {', or '.join(ways)}" if ways else "give another data set")
    )


def unlike_problems(training: str, validation: str, loss: str | None) -> Iterator[str]:
    """Why a model trained on one data set cannot be validated on the other."""
    own, other = DATASETS.get(training), DATASETS.get(validation)
    if own is None or other is None:
        return
    if own.fields != other.fields:
        theirs, ours = (", ".join(sorted({"tokens", *spec.fields})) for spec in (other, own))
        what = f"the fields {theirs}, but {quote(training)} has {ours}"
    elif own.loss != other.loss and loss is None:
        what = f"another loss than {quote(training)}"
    else:
        return
    yield (
        f"validation.dataset: {quote(validation)} has {what}; give a data set with the same fields "
        "and loss"
    )


def _misfit(dataset: str, model: Any, seq_len: int) -> Misfit | None:
    spec = DATASETS.get(dataset)
    return None if spec is None else spec.misfit(model, seq_len)

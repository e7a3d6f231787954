"""Check that a data set exists and fits the model; torch-free."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config.model import load_model_spec
from titanlite.config.schema import JobConfig
from titanlite.data.spec import DatasetSpec, JobKeys
from titanlite.errors import ConfigError, one_of, quote, suggest
from titanlite.registry import DATASETS

# A data set on the Hub, and its configuration: "allenai/c4:en".
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
TORCHTITAN_DATASETS = ("cc12m-wds", "cc12m-test", "coco-validation")


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
        advice = suggest(dataset, DATASETS, f"give {one_of(map(quote, DATASETS))}", quote)
        yield f"{section}.dataset: there is no data set {name}; {advice}"
    elif info.needs_path and path is None and info.default_path is not None:
        if not Path(info.default_path).is_dir():
            yield (
                f"{section}.dataset: {name} is read from the folder {info.default_path}, which is "
                f"not here; give its place as {section}.dataset_path, or other data, such as "
                f"--{section}.dataset={info.sampled_as}"
            )
    elif info.needs_path and path is None:
        what = "its folder, or its name on the Hub" if info.accepts_name else "its folder"
        yield f"{section}.dataset_path: is not set, but {name} is read from disk; give {what}"
    elif (info.needs_path or info.takes_path) and path is not None:
        place = Path(path).expanduser()
        is_name = info.accepts_name and NAME.fullmatch(str(place)) is not None
        if not (is_name or place.is_dir() or (info.accepts_file and place.is_file())):
            what = "a file or folder" if info.accepts_file else "a folder"
            what += " or a name such as owner/name" if info.accepts_name else ""
            yield f"{section}.dataset_path: {quote(path)} is not {what}; give the folder of {name}"
    elif path is not None:
        yield f"{section}.dataset_path: {name} is not read from a folder; remove this key"


def spec_for(config: JobConfig, dataset: str | None = None) -> DatasetSpec:
    """The spec of `dataset`, by default that of training, for this job.

    Raises ConfigError if it cannot do what the job asks.
    """
    training = config.training
    own = (training.dataset, training.dataset_path)
    keys = JobKeys(
        hf_assets_path=config.model.hf_assets_path,
        attend_across_documents=training.attend_across_documents,
        validates_elsewhere=own != (config.validation_dataset, config.validation_dataset_path),
        dump_folder=config.job.dump_folder,
    )
    return DATASETS[dataset or training.dataset].for_job(keys)


def has_tokens(config: JobConfig) -> bool:
    """Whether the samples of the training data are tokens."""
    return DATASETS[config.training.dataset].has_tokens


def source_arguments(config: JobConfig, model: Any, seq_len: int, split: str) -> dict[str, Any]:
    """The arguments of DatasetSpec.make and prepare for a split, "train" or "validation"."""
    section, dataset, path = "training", config.training.dataset, config.training.dataset_path
    if split == "validation":
        dataset, path = config.validation_dataset, config.validation_dataset_path
        if config.validation.dataset or config.validation.dataset_path:
            section = "validation"
    return {
        "model": model,
        "seq_len": seq_len,
        "split": split,
        "seed": config.debug.seed,
        "path": path or DATASETS[dataset].default_path or "",
        "path_key": f"{section}.dataset_path",
    }


def prepare_data(config: JobConfig, model: Any, seq_len: int) -> None:
    """Do what can be done once before ranks start, such as tokenizing; raises ConfigError."""
    splits = {"train": config.training.dataset}
    if config.validation.enable:
        splits["validation"] = config.validation_dataset
    for split, dataset in splits.items():
        spec_for(config, dataset).prepare(**source_arguments(config, model, seq_len, split))


# TorchTitan's default of training.seq_len, if neither model nor data set fixes the length.
DEFAULT_SEQ_LEN = 2048


def sequence_length(config: JobConfig, model: Any) -> int:
    """Tokens in a sequence: set by the model, else the job, else the data, else DEFAULT_SEQ_LEN.

    A sample without tokens counts as one.
    """
    spec = DATASETS.get(config.training.dataset)
    if spec is not None and not spec.has_tokens:
        return own_length(model) or 1
    of_data = None if spec is None else spec.seq_len(model)
    lengths = (own_length(model), config.training.seq_len, of_data)
    return next((length for length in lengths if length is not None), DEFAULT_SEQ_LEN)


def own_length(model: Any) -> int | None:
    """The fixed sequence length of a model of these sizes; None if it takes any length."""
    return getattr(model, "seq_len", None)


def fit_problems(
    section: str, dataset: str, config: JobConfig, model: Any, seq_len: int
) -> Iterator[str]:
    """Why the model cannot read the data set, with the changes that would help."""
    if dataset not in DATASETS:
        return
    try:
        spec = spec_for(config, dataset)
    except ConfigError as error:
        yield from error.problems
        return
    misfit = spec.misfit(model, seq_len)
    if misfit is None:
        return
    fitting = [quote(name) for name in DATASETS if _fits(config, name, model, seq_len)]
    ways = [f"{section}.dataset to {one_of(fitting)}"] if fitting else []
    if section == "training":
        flavors = load_model_spec(config).load_flavors()
        whole = [
            quote(name)
            for name, flavor in flavors.items()
            if spec.misfit(flavor, sequence_length(config, flavor)) is None
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


def _fits(config: JobConfig, dataset: str, model: Any, seq_len: int) -> bool:
    """Whether a data set can be suggested: it fits, and does not consist of a user's own files."""
    info = DATASETS[dataset]
    if (info.needs_path or info.takes_path) and info.accepts_file:
        return False
    with contextlib.suppress(ConfigError):
        return spec_for(config, dataset).misfit(model, seq_len) is None
    return False

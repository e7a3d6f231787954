"""Checks of the keys of [checkpoint] against each other and the model; torch-free."""

from collections.abc import Iterator
from pathlib import Path

from titanlite.config.draft import Draft
from titanlite.config.model import load_model_spec
from titanlite.errors import ConfigError, quote
from titanlite.fields import MODEL, reads
from titanlite.models.hf_format import format_of, is_hf_folder, sizes_problems, weight_files


@reads("checkpoint")
def _checkpoints(job: Draft) -> Iterator[str]:
    """The path to load from exists, and a .safetensors file is used only for weights."""
    section = job.config.checkpoint
    if section.create_seed_checkpoint and not section.saves:
        yield (
            "checkpoint.create_seed_checkpoint: nothing would be saved; set checkpoint.enable = "
            "true and checkpoint.load_only = false, or remove this key"
        )
    if not section.enable:
        for name in ("initial_load_path", "initial_load_in_hf", "load_step"):
            if getattr(section, name) != type(section).model_fields[name].default:
                yield (
                    f"checkpoint.{name}: checkpoint.enable is false, so nothing is loaded; set "
                    "checkpoint.enable = true, or remove this key"
                )
        return
    if section.last_save_in_hf and not section.last_save_model_only:
        yield (
            "checkpoint.last_save_in_hf: a .safetensors file holds only weights; set "
            "checkpoint.last_save_model_only = true"
        )
    path = section.initial_load_path
    if path is None:
        if section.initial_load_in_hf:
            yield (
                "checkpoint.initial_load_in_hf: there is nothing to load; give "
                "checkpoint.initial_load_path, or remove this key"
            )
        return
    place = Path(path).expanduser()
    if section.initial_load_in_hf:
        if not place.is_file() and not any(place.glob("*.safetensors")):
            yield (
                f"checkpoint.initial_load_path: {quote(path)} is neither a .safetensors file nor "
                "a folder of such files; give one of them"
            )
        if not section.initial_load_model_only:
            yield (
                "checkpoint.initial_load_model_only: a .safetensors file holds only weights; "
                "set it to true"
            )
    elif not place.is_dir():
        yield (
            f"checkpoint.initial_load_path: {quote(path)} is not a folder; give the step-N folder "
            "of a checkpoint, or set checkpoint.initial_load_in_hf for a .safetensors file"
        )


@reads("checkpoint", MODEL)
def _hf_folder(job: Draft) -> Iterator[str]:
    """The config.json of a Hugging Face folder to load from has the sizes of [model]."""
    section = job.config.checkpoint
    if not (section.enable and section.initial_load_in_hf and section.initial_load_path):
        return
    folder = Path(section.initial_load_path).expanduser()
    try:
        if not folder.is_dir():
            return
        weight_files(folder)
        format = format_of(load_model_spec(job.config))
        if format is not None and is_hf_folder(folder):
            for line in sizes_problems(format, job.model, folder):
                yield f"checkpoint.initial_load_path: {line}"
    except ConfigError as error:
        yield from error.problems


@reads("checkpoint", MODEL)
def _written_to_hf(job: Draft) -> Iterator[str]:
    """The Hugging Face folder of the last step can hold the model."""
    section = job.config.checkpoint
    if not (section.enable and section.last_save_in_hf):
        return
    try:
        if (format := format_of(load_model_spec(job.config))) is not None:
            format.require_fit(job.model)
    except ConfigError as error:
        yield from error.problems


CHECKPOINT_CHECKS = (_checkpoints, _hf_folder, _written_to_hf)

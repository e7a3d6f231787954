"""The weights of the whole model in one .safetensors file, from any plan and to any plan.

A file is untrusted. It has only numbers and text; the configuration in its text is plain data, read
by config/stored.py.

Source of the format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titanlite.checkpoint import state
from titanlite.checkpoint.group import CheckpointGroup
from titanlite.checkpoint.manifest import SAFETENSORS, record_of
from titanlite.checkpoint.storage import Seal
from titanlite.errors import ConfigError
from titanlite.files import open_regular, shown
from titanlite.job import Job

CONFIG_KEY = "titanlite.config"


def save_safetensors(
    job: Job, folder: Path, dtype: torch.dtype, seal: Seal, ranks: CheckpointGroup
) -> None:
    """Gather the weights on rank 0, which writes them and seals the folder.

    Every rank must call this. Rank 0 holds the whole model in memory, in `dtype`.
    """
    tensors: dict[str, Tensor] = {}
    own_buffers = {name: buffer.cpu() for name, buffer in job.buffers.items()}
    for buffers in ranks.gathered(own_buffers):
        tensors |= buffers
    for name, whole in job.whole_parameters():
        if job.world.is_first:
            tensors[name] = whole.to("cpu", dtype, copy=True).contiguous()
    if job.world.is_first:
        folder.mkdir(parents=True)
        config = job.config.model_dump(mode="json", exclude_unset=True)
        write_file(folder / SAFETENSORS, tensors, config)
        seal({SAFETENSORS: record_of(folder / SAFETENSORS)})


def write_file(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write tensors and the job's configuration, and flush the file to the disk."""
    metadata = {"format": "pt", CONFIG_KEY: json.dumps(config)}
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def load_safetensors(job: Job, path: Path, ranks: CheckpointGroup) -> None:
    """Load each rank's shards from a .safetensors file, or a folder of them.

    Every rank must call this. Raises ConfigError for missing keys, unexpected keys, wrong shapes,
    and weights that are not floating point.
    """
    pieces = {name.partition(".")[2]: piece for name, piece in state.weight_pieces(job).items()}
    # Under a pipeline, each rank has only some of the names.
    whole = set().union(*ranks.gathered(set(pieces)))
    ranks.all_do(lambda: _fill(pieces, path, whole))
    ranks.all_do(lambda: _refuse_missing(sorted(job.parameters.keys() & pieces.keys()), path))


def _fill(pieces: state.Pieces, path: Path, whole: set[str]) -> None:
    """Fill the pieces found in `path`, and remove them from `pieces`.

    `whole` has the names of the whole model.
    """
    for file in files_of(path):
        with _opened(file) as stored:
            if more := sorted(set(stored.keys()) - whole):
                raise ConfigError(
                    f"checkpoint: {file} has unexpected keys: {_list(more)}; give the [model] it "
                    "belongs to"
                )
            for name in set(stored.keys()) & set(pieces):
                piece, source = pieces.pop(name), stored.get_slice(name)
                if tuple(source.get_shape()) != tuple(piece.shape):
                    raise ConfigError(
                        f"checkpoint: {file}: {shown(name)} has shape {source.get_shape()}, and "
                        f"{list(piece.shape)} in the model; give the [model] it belongs to"
                    )
                if piece.local.numel():
                    where = tuple(
                        slice(start, start + size)
                        for start, size in zip(piece.offsets, piece.local.shape, strict=True)
                    )
                    found = source[where] if where else stored.get_tensor(name)
                    if found.is_floating_point() != piece.local.is_floating_point():
                        raise ConfigError(
                            f"checkpoint: {file}: {shown(name)} is {_dtype(found)}, and "
                            f"{_dtype(piece.local)} in the model; give floating-point weights"
                        )
                    piece.local.copy_(found)


def _refuse_missing(names: list[str], path: Path) -> None:
    if names:
        raise ConfigError(
            f"checkpoint: {path} has missing keys: {_list(names)}; give the weights of this model"
        )


def _list(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + more


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file, or a folder of them; raises ConfigError."""
    tensors: dict[str, Tensor] = {}
    for file in files_of(path):
        with _opened(file) as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    return tensors


def read_config(path: Path) -> dict[str, Any] | None:
    """The job's configuration in a .safetensors file; None if titanlite did not write the file.

    Raises ConfigError if the configuration is not valid.
    """
    file = files_of(path)[0]
    with _opened(file) as stored:
        text = (stored.metadata() or {}).get(CONFIG_KEY)
    if not text:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or not all(isinstance(keys, dict) for keys in config.values()):
        raise ConfigError(f"checkpoint: {file} has a {CONFIG_KEY} that is not a configuration")
    return config


def files_of(path: Path) -> list[Path]:
    """The file `path`, or the .safetensors files in it; raises ConfigError if there is none."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"checkpoint: {path} is neither a .safetensors file nor a folder of them")
    return files


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a .safetensors file; raises ConfigError if it, or a tensor of it, cannot be read."""
    try:
        # A pipe would block safe_open. Links are followed: Hugging Face's folders consist of links.
        open_regular(file).close()
        with safe_open(file, framework="pt") as stored:
            yield stored
    except OSError as error:
        raise ConfigError(f"checkpoint: {file}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigError(
            f"checkpoint: {file} cannot be read ({shown(str(error), 200)})"
        ) from error

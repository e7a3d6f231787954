"""Hugging Face folders for a model outside a job: `titanlite.save_hf`, `titanlite.load_hf`.

The model may be plain or parallelized by hand: its parameters are tensors or DTensors. It is one of
transformers, or of a class that is registered with an HFFormat and keeps its sizes as `config`.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import titanlite.models  # noqa: F401 (registers the models)
from titanlite.checkpoint.huggingface import SHARD_BYTES, FolderWriter
from titanlite.checkpoint.storage import Piece
from titanlite.checkpoint.weights import Names, opened_weights
from titanlite.errors import TitanliteError
from titanlite.models.hf_format import format_of, is_hf_folder
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import buffers_of, local_part, offsets_of, whole_tensor
from titanlite.modules.tied import find_tied
from titanlite.ranks.peers import Peers
from titanlite.registry import MODELS, load


def save_hf(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    like: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `model` as a new Hugging Face folder, which from_pretrained reads.

    Every rank of the model's process group must call this: DTensors are gathered one by one, and
    rank 0 writes files of up to `shard_bytes`, one at a time in memory. `dtype` is by default that
    of the parameters. Tokenizer files and generation settings are copied from `like`, another such
    folder. On return, the folder is complete on rank 0's file system.

    Raises TitanliteError on every rank if the folder exists, if the model is neither of
    transformers nor registered with a Hugging Face format, if parameters have no values or several
    dtypes, or if writing fails.
    """
    folder, like = Path(folder), None if like is None else Path(like)
    names, config = _format_of(model)
    tied = find_tied(model)
    parameters = {
        canonical_name(name): parameter
        for name, parameter in model.named_parameters()
        if name not in tied
    }
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if dtype is None and len(dtypes) != 1:
        found = ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))
        raise TitanliteError(f"save_hf: the parameters have several dtypes ({found}); give dtype")
    if any(parameter.is_meta for parameter in parameters.values()):
        raise TitanliteError("save_hf: the model is on the meta device; give it values first")
    if like is not None and not is_hf_folder(like):
        raise TitanliteError(f"save_hf: like, {like}, has no config.json; give a folder that has")
    unfinished = folder.with_name(f"{folder.name}.new")
    peers = Peers()
    writers: list[FolderWriter] = []
    failures: list[Exception] = []

    def begin() -> None:
        if folder.exists() or unfinished.exists():
            raise TitanliteError(f"{folder} or {unfinished} exists already; give another name")
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        kind, buffers = dtype or next(iter(dtypes)), buffers_of([model])
        writers.append(
            FolderWriter(unfinished, shapes, names, kind, buffers=buffers, shard_bytes=shard_bytes)
        )

    def add(name: str, whole: Tensor) -> None:
        # If rank 0 fails now, the others still gather with it, and learn of it at the end.
        try:
            if not failures:
                writers[0].add(name, whole)
        except (OSError, TitanliteError) as error:
            failures.append(error)

    def end() -> None:
        if failures:
            raise failures[0]
        writers[0].finish(config, like)
        unfinished.rename(folder)

    with _explaining(folder):
        peers.from_first(begin)
        try:
            for name, parameter in parameters.items():
                whole = whole_tensor(parameter.detach())
                if peers.rank == 0:
                    add(name, whole)
            peers.from_first(end)
        except (OSError, TitanliteError):
            if writers:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise


def load_hf(model: nn.Module, folder: str | Path) -> None:
    """Load a Hugging Face folder, or one .safetensors file of it, into `model` in place.

    Each rank reads only its shards of DTensors. Parameters may have another dtype than the file.
    Raises ConfigError for missing and unexpected keys and wrong shapes, and TitanliteError for a
    model without storage, or of a kind that save_hf does not take.
    """
    names, _ = _format_of(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise TitanliteError(
            "load_hf: the model is on the meta device; call to_empty(device=...) on it, and "
            "set its buffers"
        )
    further = find_tied(model)
    parameters = {
        canonical_name(n): p.detach() for n, p in model.named_parameters() if n not in further
    }
    tensors = {**parameters, **buffers_of([model])}
    pieces = {name: Piece(local_part(t), t.shape, offsets_of(t)) for name, t in tensors.items()}
    tied = {canonical_name(name): canonical_name(first) for name, first in further.items()}
    with opened_weights(Path(folder), names) as stored:
        stored.refuse_unexpected(stored.names_of(pieces, tied))
        stored.fill(pieces, parameters)


def _format_of(model: Any) -> tuple[Names, dict[str, Any]]:
    """Where the model's parameters are stored, and its config.json."""
    config = getattr(model, "config", None)
    if hasattr(config, "model_type") and hasattr(config, "to_json_string"):
        from titanlite.models.hf.format import FORMAT, as_json

        return Names(FORMAT), as_json(config)
    # FSDP2 inserts its own class before the model's.
    for spec in MODELS.values():
        if spec.hf is not None and load(spec.build) in type(model).__mro__:
            format = format_of(spec)
            assert format is not None
            format.require_fit(config)
            return Names(format, config), format.config(config)
    raise TitanliteError(
        f"{type(model).__name__} has no Hugging Face format; give a model of transformers, or "
        "register its class with hf=... and keep its sizes as `config`"
    )


@contextlib.contextmanager
def _explaining(folder: Path) -> Iterator[None]:
    """Raise an error inside as one line about the export."""
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise TitanliteError(f"save_hf: writing {folder} failed: {why}") from error
    except TitanliteError as error:
        raise TitanliteError(f"save_hf: {error}") from error

"""`titanlite convert`: a checkpoint to a .safetensors file or back, in one process."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from titanlite.checkpoint.folder import STEP, CheckpointFolder, find_checkpoint, make_token
from titanlite.checkpoint.manifest import (
    SAFETENSORS,
    BrokenCheckpointError,
    FileRecord,
    Manifest,
    check_files,
    told_invalid,
)
from titanlite.errors import ConfigError

DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="titanlite convert",
        description="Convert the weights of a checkpoint to one .safetensors file, or a "
        ".safetensors file to a checkpoint that holds only weights.",
    )
    parser.add_argument("source", type=Path, help="step-N, a folder of them, or .safetensors")
    parser.add_argument("--out", type=Path, required=True, help="file or folder to write")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="dtype to write; default: unchanged")
    asked = parser.parse_args(arguments)
    is_file = asked.source.suffix == ".safetensors"
    if is_file == (asked.out.suffix == ".safetensors"):
        raise ConfigError(
            "--out: one of source and --out must be a .safetensors file, and the other a folder"
        )
    if asked.out.exists():
        raise ConfigError(f"--out: {asked.out} exists already; give another name")
    convert = to_checkpoint if is_file else to_safetensors
    count = convert(asked.source, asked.out, asked.dtype)
    print(f"{count:,} parameters: {asked.out}")
    return 0


def to_safetensors(source: Path, out: Path, dtype: str | None = None) -> int:
    """Write the weights of a checkpoint to one file; returns the number of parameters."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    from titanlite.checkpoint import storage
    from titanlite.checkpoint.state import MODEL
    from titanlite.checkpoint.weights import read_tensors, write_file

    path, manifest = find_checkpoint(source)
    try:
        check_files(path, manifest.files, manifest.files)
        if manifest.stored_as == "safetensors":
            tensors = read_tensors(path / SAFETENSORS)
        else:
            stored = {
                name: what
                for name, what in storage.stored_tensors(path, manifest.files).items()
                if name.startswith(f"{MODEL}.")
            }
            whole = {name: torch.zeros(shape, dtype=kind) for name, (shape, kind) in stored.items()}
            storage.load({n: storage.Piece.whole(t) for n, t in whole.items()}, path, None)
            tensors = {name.partition(".")[2]: tensor for name, tensor in whole.items()}
    except (BrokenCheckpointError, CheckpointException) as error:
        why = storage.told(storage.first_cause(error))
        raise ConfigError(f"{path} cannot be used: {why}; give another checkpoint") from error
    if dtype:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    with _making(out) as unfinished:
        unfinished.touch(exist_ok=False)
        write_file(unfinished, tensors, manifest.config)
        unfinished.rename(out)
    return sum(tensor.numel() for tensor in tensors.values())


def to_checkpoint(source: Path, out: Path, dtype: str | None = None) -> int:
    """Write a .safetensors file as a checkpoint of weights; returns the number of elements."""
    import torch

    from titanlite.checkpoint import storage
    from titanlite.checkpoint.state import MODEL
    from titanlite.checkpoint.weights import read_config, read_tensors

    tensors = read_tensors(source)
    if dtype:
        tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    # A name step-N makes it the checkpoint of step N, and the newest one of its folder.
    folder, named = CheckpointFolder(out.parent), STEP.fullmatch(out.name)
    config = read_config(source) or {}
    if not tensors:
        raise ConfigError(f"{source} has no tensors; give another file")

    def seal(files: Mapping[str, FileRecord]) -> None:
        try:
            manifest = Manifest(
                step=int(named[1]) if named else 0,
                serial=folder.next_serial() if named else 1,
                holds="weights",
                stored_as="dcp",
                shapes={name: list(tensor.shape) for name, tensor in tensors.items()},
                dtype=", ".join(sorted(kinds)),
                plan="one file",
                num_ranks=1,
                config=config,
                titanlite="",
                torch=torch.__version__,
                files=dict(files),
            )
        except ValidationError as error:
            why = told_invalid(error)
            raise ConfigError(f"{source} cannot be converted to a checkpoint: {why}") from error
        folder.commit(unfinished, out, manifest, make_token())

    pieces = {f"{MODEL}.{name}": storage.Piece.whole(tensor) for name, tensor in tensors.items()}
    with _making(out) as unfinished:
        unfinished.mkdir()
        storage.save(pieces, unfinished, None, seal)
    return sum(tensor.numel() for tensor in tensors.values())


@contextlib.contextmanager
def _making(out: Path) -> Iterator[Path]:
    """A temporary name beside `out`, to write to and then rename; removed at the end if it exists.

    Raises ConfigError if writing fails.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    from titanlite.checkpoint.storage import first_cause, told

    unfinished = out.with_name(f"{out.name}.new-{make_token()}")
    try:
        if not out.parent.exists():
            out.parent.mkdir(parents=True)
        yield unfinished
    except (OSError, CheckpointException) as error:
        cause = first_cause(error)
        if isinstance(cause, ConfigError):
            raise cause from error
        raise ConfigError(f"--out: writing {out} failed: {told(cause)}") from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()

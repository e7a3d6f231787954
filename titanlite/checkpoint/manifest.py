"""What a checkpoint says of itself: manifest.json, written last; torch-free.

It names every file with its size and checksum, and its own checksum too, so that a checkpoint that
is torn or was altered is known before anything of it is used. All that is not a tensor (the step,
the sampler's integer, the job's configuration) stands here, as plain JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from titanlite.errors import TitanliteError

MANIFEST = "manifest.json"
FORMAT = 1
# Read at once when a file is checked.
BLOCK_BYTES = 4 * 2**20


class BrokenCheckpointError(TitanliteError):
    """A checkpoint is torn, or not as it was written; the message says what, not where."""


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint as it was written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    `holds` is "training" (all it takes to go on) or "weights"; `stored_as` how the tensors are:
    by torch.distributed.checkpoint, or in a .safetensors file. `serial` grows with each checkpoint
    that is put into a folder: the newest has the largest, whatever its step. `shapes` are those of
    the whole model's parameters, by canonical name.
    """

    step: int
    serial: int
    holds: Literal["training", "weights"]
    stored_as: Literal["dcp", "safetensors"]
    shapes: dict[str, list[int]]
    dtype: str
    plan: str
    num_ranks: int
    config: dict[str, Any]
    titanlite: str
    torch: str
    state: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size_bytes for record in self.files.values())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def to_json(self) -> str:
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps({"sha256": _digest(content), **content}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; raises BrokenCheckpointError."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise BrokenCheckpointError(f"{MANIFEST}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{MANIFEST} is not as it was written") from error
    if not isinstance(content, dict) or content.pop("sha256", None) != _digest(content):
        raise BrokenCheckpointError(f"{MANIFEST} is not as it was written")
    if content.pop("format", None) != FORMAT:
        raise BrokenCheckpointError(f"{MANIFEST} is of another version of titanlite")
    try:
        files = {name: FileRecord(**record) for name, record in content.pop("files").items()}
        return Manifest(files=files, **content)
    except (KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpointError(f"{MANIFEST} lacks something, or has too much") from error


def check_files(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    """Raises BrokenCheckpointError where one of `names` is not as `files` has it."""
    for name in names:
        found = record_of(folder / name)
        if found.size_bytes != files[name].size_bytes:
            raise BrokenCheckpointError(
                f"{name} has {found.size_bytes:,} bytes, not {files[name].size_bytes:,}"
            )
        if found.sha256 != files[name].sha256:
            raise BrokenCheckpointError(f"{name} is not as it was written (its checksum differs)")


def record_of(path: Path) -> FileRecord:
    """Size and checksum of a file; raises BrokenCheckpointError where it cannot be read."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                size += len(block)
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path.name} is missing") from error
    except OSError as error:
        raise BrokenCheckpointError(f"{path.name}: {error.strerror or error}") from error
    return FileRecord(size, digest.hexdigest())


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

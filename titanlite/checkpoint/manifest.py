"""What a checkpoint says of itself: manifest.json, written last; torch-free.

It names every file with its size and checksum, and its own checksum too, so that a checkpoint that
is torn or was altered is known before anything of it is used. All that is not a tensor (the step,
the sampler's integer, the job's configuration) stands here, as plain JSON. A checksum does not say
who wrote it: every value is checked, and only regular files in the checkpoint's own folder are
opened.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from titanlite.errors import TitanliteError
from titanlite.files import open_regular, read_bytes, shown

MANIFEST = "manifest.json"
# DCP's own file, and how the names of those with tensors end; the one file of the other format.
METADATA, TENSORS, SAFETENSORS = ".metadata", ".distcp", "model.safetensors"
FORMAT = 1
# Read at once when a file is checked.
BLOCK_BYTES = 4 * 2**20
# The names and shapes of a hundred thousand parameters take about a tenth of it.
MOST_MANIFEST_BYTES = 128 * 2**20


class BrokenCheckpointError(TitanliteError):
    """A checkpoint is torn, or not as it was written; the message says what, not where."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that cannot be printed")
    return text


def _file_name(name: str) -> str:
    if name in (".", "..", MANIFEST) or "/" in name or "\\" in name:
        raise ValueError("is not the name of a file in the checkpoint's folder")
    return name


Text = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_printable)]
Name = Annotated[Text, Field(min_length=1)]
FileName = Annotated[Name, StringConstraints(max_length=255), AfterValidator(_file_name)]
# What a float64 still holds exactly, and an int64 with room for sums.
Count = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[Count, Field(ge=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Record):
    """A file of a checkpoint as it was written."""

    size_bytes: Count
    sha256: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class OptimizerState(_Record):
    """Which optimizer a checkpoint has the state of, and its settings then."""

    name: Name
    settings: dict[str, Any]


class TrainingState(_Record):
    """What a run goes on with that is not a tensor: steps of the schedule, samples drawn."""

    lr_scheduler: Count
    dataloader: Count
    optimizer: OptimizerState


class Manifest(_Record):
    """What a checkpoint holds.

    `holds` is "training" (all it takes to go on) or "weights"; `stored_as` how the tensors are:
    by torch.distributed.checkpoint, or in a .safetensors file. `serial` grows with each checkpoint
    that is put into a folder: the newest has the largest, whatever its step. `shapes` are those of
    the whole model's parameters, by canonical name. `state` is a TrainingState's values, or empty
    where weights alone are held. Raises pydantic's ValidationError where a value is none of these.
    """

    step: Count
    serial: Positive
    holds: Literal["training", "weights"]
    stored_as: Literal["dcp", "safetensors"]
    shapes: Annotated[dict[Name, Annotated[list[Count], Field(max_length=64)]], Field(min_length=1)]
    dtype: Name
    plan: Name
    num_ranks: Positive
    config: dict[Name, dict[str, Any]]
    titanlite: Text
    torch: Text
    state: dict[str, Any] = {}
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        if self.stored_as == "safetensors":
            if self.holds == "training":
                raise ValueError("a .safetensors file holds weights alone")
            if set(self.files) != {SAFETENSORS}:
                raise ValueError(f"files is not {SAFETENSORS} alone")
        elif METADATA not in self.files or not any(n.endswith(TENSORS) for n in self.files):
            raise ValueError(f"files lacks {METADATA}, or any {TENSORS} file")
        if self.holds == "training":
            try:
                TrainingState.model_validate(self.state)
            except ValidationError as error:
                raise ValueError(f"state: {told_invalid(error)}") from error
        elif self.state:
            raise ValueError("state is not empty, and weights alone are held")
        return self

    @property
    def training_state(self) -> TrainingState:
        """`state`, where all it takes to go on is held."""
        return TrainingState.model_validate(self.state)

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(record.size_bytes for record in self.files.values())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def to_json(self) -> str:
        content = {"format": FORMAT, **self.model_dump()}
        return json.dumps({"sha256": _digest(content), **content}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; raises BrokenCheckpointError."""
    try:
        text = read_bytes(folder / MANIFEST, most_bytes=MOST_MANIFEST_BYTES, follow_links=False)
        content = json.loads(text)
        is_whole = isinstance(content, dict) and content.pop("sha256", None) == _digest(content)
    except OSError as error:
        raise BrokenCheckpointError(f"{MANIFEST}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpointError(f"{MANIFEST} is not as it was written") from error
    if not is_whole:
        raise BrokenCheckpointError(f"{MANIFEST} is not as it was written")
    if content.pop("format", None) != FORMAT:
        raise BrokenCheckpointError(f"{MANIFEST} is of another version of titanlite")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise BrokenCheckpointError(f"{MANIFEST}: {told_invalid(error)}") from error


def told_invalid(error: ValidationError) -> str:
    """The first thing that is wrong, as `key.of.value: what is wanted`."""
    first = error.errors()[0]
    place = shown(".".join(str(part) for part in first["loc"] if part != "[key]"))
    message = first["msg"].removeprefix("Value error, ")
    message = shown(f"{message[:1].lower()}{message[1:]}".split("\n")[0], 200)
    return f"{place}: {message}" if place else message


def check_files(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    """Raises BrokenCheckpointError where one of `names` is not as `files` has it."""
    for name in names:
        found = record_of(folder / name, files[name].size_bytes)
        if found.sha256 != files[name].sha256:
            raise BrokenCheckpointError(f"{name} is not as it was written (its checksum differs)")


def record_of(path: Path, size_bytes: int | None = None) -> FileRecord:
    """Size and checksum of a file; raises BrokenCheckpointError where it cannot be read.

    And, before reading it, where `size_bytes` is given and not its size.
    """
    digest, size = hashlib.sha256(), 0
    with open_in_checkpoint(path) as file:
        there = file.seek(0, 2)
        if size_bytes not in (None, there):
            raise BrokenCheckpointError(f"{path.name} has {there:,} bytes, not {size_bytes:,}")
        file.seek(0)
        try:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                size += len(block)
        except OSError as error:
            raise BrokenCheckpointError(f"{path.name}: {error.strerror or error}") from error
    return FileRecord(size_bytes=size, sha256=digest.hexdigest())


def open_in_checkpoint(path: Path) -> BinaryIO:
    """A file of a checkpoint, open to read; raises BrokenCheckpointError where it is none."""
    try:
        return open_regular(path, follow_links=False)
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path.name} is missing") from error
    except OSError as error:
        raise BrokenCheckpointError(f"{path.name} {error.strerror or error}") from error


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

"""manifest.json, the last file written of a checkpoint: its content and checksums; torch-free.

It lists every file with its size and checksum, and has a checksum of itself, so that a torn or
altered checkpoint is detected before it is used. It also holds everything that is not a tensor (the
step, the sampler's integer, the job's configuration) as plain JSON. Checksums do not prove who
wrote a checkpoint, so every value is validated, and only regular files in its folder are opened.
"""

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
# DCP's metadata file and the suffix of its tensor files; the only file of the second format, and
# what a Hugging Face folder has beside .safetensors files.
METADATA, TENSORS, SAFETENSORS = ".metadata", ".distcp", "model.safetensors"
HF_CONFIG = "config.json"
PEFT_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
FORMAT = 1
# The block size in which files are read for their checksums.
BLOCK_BYTES = 4 * 2**20
# The names and shapes of 100,000 parameters take about a tenth of this.
MOST_MANIFEST_BYTES = 128 * 2**20


class BrokenCheckpointError(TitanliteError):
    """A checkpoint is torn or altered; the message says what is wrong, but not its path."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def _file_name(name: str) -> str:
    if name in (".", "..", MANIFEST) or "/" in name or "\\" in name:
        raise ValueError("is not a file name in the checkpoint's folder")
    return name


Text = Annotated[str, StringConstraints(max_length=1000), AfterValidator(_printable)]
Name = Annotated[Text, Field(min_length=1)]
FileName = Annotated[Name, StringConstraints(max_length=255), AfterValidator(_file_name)]
# A float64 holds these integers exactly, and sums of them fit in an int64.
Count = Annotated[int, Field(ge=0, le=2**53)]
Positive = Annotated[Count, Field(ge=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Record):
    """Size and checksum of a file of a checkpoint."""

    size_bytes: Count
    sha256: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class OptimizerState(_Record):
    """The class name and the settings of the optimizer that was saved."""

    name: Name
    settings: dict[str, Any]


class TrainingState(_Record):
    """The training state apart from tensors: schedule steps, samples drawn, optimizer settings.

    `data` identifies the training data, if the data set can tell. `callbacks` is Event.state.
    """

    lr_scheduler: Count
    dataloader: Count
    optimizer: OptimizerState
    data: Text = ""
    callbacks: dict[str, Any] = {}


class Manifest(_Record):
    """The content of a checkpoint.

    `holds` is "training" (the full training state) or "weights". `stored_as` is the file format:
    torch.distributed.checkpoint, one .safetensors file, a Hugging Face folder, or peft's folder of
    adapters alone. `serial` increases with each checkpoint of a folder, so the newest has the
    largest, whatever its step. `shapes` has the unsharded shape of each parameter of the whole
    model, by canonical name. `state` is None if only weights are held. Raises pydantic's
    ValidationError for an invalid value.
    """

    step: Count
    serial: Positive
    holds: Literal["training", "weights"]
    stored_as: Literal["dcp", "safetensors", "huggingface", "peft"]
    shapes: Annotated[dict[Name, Annotated[list[Count], Field(max_length=64)]], Field(min_length=1)]
    dtype: Name
    plan: Name
    num_ranks: Positive
    config: dict[Name, dict[str, Any]]
    titanlite: Text
    torch: Text
    state: TrainingState | None = None
    files: dict[FileName, FileRecord]

    @model_validator(mode="after")
    def _fits_together(self) -> "Manifest":
        if self.stored_as != "dcp" and self.holds == "training":
            raise ValueError("a .safetensors file holds only weights")
        if self.stored_as == "huggingface":
            if HF_CONFIG not in self.files or not self.weight_files:
                raise ValueError(f"files lacks {HF_CONFIG}, or any .safetensors file")
        elif self.stored_as == "peft":
            if not {PEFT_CONFIG, ADAPTERS} <= self.files.keys():
                raise ValueError(f"files lacks {PEFT_CONFIG} or {ADAPTERS}")
        elif self.stored_as == "safetensors":
            if set(self.files) != {SAFETENSORS}:
                raise ValueError(f"files must list only {SAFETENSORS}")
        elif METADATA not in self.files or not any(n.endswith(TENSORS) for n in self.files):
            raise ValueError(f"files lacks {METADATA}, or any {TENSORS} file")
        if (self.state is None) != (self.holds == "weights"):
            raise ValueError("state must be there if, and only if, the training state is held")
        return self

    @property
    def training_state(self) -> TrainingState:
        """`state`, if the full training state is held."""
        assert self.state is not None
        return self.state

    @property
    def weight_files(self) -> list[str]:
        """The .safetensors files."""
        return sorted(name for name in self.files if name.endswith(".safetensors"))

    @property
    def size_bytes(self) -> int:
        """The size of all files except the manifest."""
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
        raise BrokenCheckpointError(f"{MANIFEST} is corrupt") from error
    if not is_whole:
        raise BrokenCheckpointError(f"{MANIFEST} is corrupt")
    if content.pop("format", None) != FORMAT:
        raise BrokenCheckpointError(f"{MANIFEST} was written by another version of titanlite")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        raise BrokenCheckpointError(f"{MANIFEST}: {describe_invalid(error)}") from error


def describe_invalid(error: ValidationError) -> str:
    """The first problem, as `key.of.value: what is expected`."""
    first = error.errors()[0]
    place = shown(".".join(str(part) for part in first["loc"] if part != "[key]"))
    message = first["msg"].removeprefix("Value error, ")
    message = shown(f"{message[:1].lower()}{message[1:]}".split("\n")[0], 200)
    return f"{place}: {message}" if place else message


def check_files(folder: Path, files: Mapping[str, FileRecord], names: Iterable[str]) -> None:
    """Raises BrokenCheckpointError if a file of `names` differs from its record in `files`."""
    for name in names:
        found = record_of(folder / name, files[name].size_bytes)
        if found.sha256 != files[name].sha256:
            raise BrokenCheckpointError(f"{name} is corrupt (its checksum differs)")


def record_of(path: Path, size_bytes: int | None = None) -> FileRecord:
    """Size and checksum of a file; raises BrokenCheckpointError if it cannot be read.

    If `size_bytes` is given and is not its size, the error is raised before the file is read.
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
    """Open a file of a checkpoint for reading; raises BrokenCheckpointError if that fails."""
    try:
        return open_regular(path, follow_links=False)
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{path.name} is missing") from error
    except OSError as error:
        raise BrokenCheckpointError(f"{path.name} {error.strerror or error}") from error


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()

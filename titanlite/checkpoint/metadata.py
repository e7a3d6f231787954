"""A safe reader of DCP's .metadata, the pickle that lists the tensors and their places in files.

`pickle.load` can run any code. Here each class that DCP writes is replaced by a placeholder without
behavior that only stores its arguments; any other name is refused. DCP's own objects are then built
from the placeholders, after every value has been checked.
"""

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from titanlite.checkpoint.manifest import METADATA, BrokenCheckpointError, open_in_checkpoint
from titanlite.files import shown

# No disk holds 2**62 elements or bytes, and the sum of two such numbers fits in an int64.
MOST = 2**62


def read_metadata(folder: Path) -> Metadata:
    """The metadata of the checkpoint in `folder`; raises BrokenCheckpointError.

    In the result, each piece of a tensor lies within its tensor, and has a place in a regular file
    of the folder that is large enough for it. The pieces of a tensor have as many elements as the
    tensor.
    """
    with open_in_checkpoint(folder / METADATA) as file:
        try:
            content = _Unpickler(file).load()
        except BrokenCheckpointError:
            raise
        except Exception as error:  # altered bytes can raise anything
            name = type(error).__name__
            raise BrokenCheckpointError(f"{METADATA} cannot be read ({name})") from error
    try:
        return _Builder(folder).metadata(content)
    except RecursionError as error:
        raise BrokenCheckpointError(f"{METADATA} is nested too deeply") from error


class _Plain:
    """Placeholder for an object of one of DCP's classes: its arguments and its state."""

    kind = ""
    # Defaults, since pickle may create an object without calling __init__.
    values: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


_OF_DCP = (
    *(Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata, BytesStorageMetadata),
    *(ChunkStorageMetadata, TensorProperties, _MEM_FORMAT_ENCODING, _StorageInfo),
)
_NAMES = {(kind.__module__, kind.__name__): kind.__name__ for kind in _OF_DCP}
_NAMES |= {("torch", "Size"): "Size", ("torch.serialization", "_get_layout"): "layout"}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # New classes for each pickle, so that it cannot alter those of the next one.
        self._classes = {
            path: type(kind, (_Plain,), {"kind": kind}) for path, kind in _NAMES.items()
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._classes:
            return self._classes[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return self._member
        raise BrokenCheckpointError(
            f"{METADATA} refers to {shown(f'{module}.{name}')}, which is not allowed"
        )

    def _member(self, kind: Any, name: Any) -> Any:
        """A member of the one enum in metadata, which Python 3.11.0 to 3.11.3 pickle by name."""
        enum = self._classes["torch.distributed.checkpoint.metadata", _MEM_FORMAT_ENCODING.__name__]
        members = _MEM_FORMAT_ENCODING.__members__
        if kind is not enum or not isinstance(name, str) or name not in members:
            raise BrokenCheckpointError(f"{METADATA} refers to builtins.getattr of another object")
        return enum(members[name].value)


class _Builder:
    """Builds DCP's objects from placeholders; every method raises BrokenCheckpointError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_bytes: dict[str, int] = {}

    def metadata(self, plain: Any) -> Metadata:
        state = _state(plain, "Metadata")
        if not isinstance(state, dict) or not isinstance(state.get("state_dict_metadata"), dict):
            raise BrokenCheckpointError(f"{METADATA} has no metadata")
        named = {_name(name): value for name, value in state["state_dict_metadata"].items()}
        stored = {name: self._stored(name, value) for name, value in named.items()}
        given = state.get("storage_data")
        if not isinstance(given, dict):
            raise BrokenCheckpointError(f"{METADATA} has no valid list of files")
        places = {self._index(index): self._place(place) for index, place in given.items()}
        for name, what in stored.items():
            if isinstance(what, TensorStorageMetadata):
                self._check_places(name, what, places)
        return Metadata(stored, storage_data=places, storage_meta=StorageMeta())

    def _stored(self, name: str, plain: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if _kind(plain) == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = _fields(plain, "TensorStorageMetadata", "properties", "size", "chunks")
        size = _size(state["size"], name)
        properties = _state(state["properties"], "TensorProperties")
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, torch.dtype):
            raise BrokenCheckpointError(f"{METADATA} has no valid dtype of {name}")
        if not isinstance(state["chunks"], list):
            raise BrokenCheckpointError(f"{METADATA} has no valid list of pieces of {name}")
        chunks = []
        for chunk in state["chunks"]:
            fields = _fields(chunk, "ChunkStorageMetadata", "offsets", "sizes")
            offsets, sizes = _size(fields["offsets"], name), _size(fields["sizes"], name)
            if not len(offsets) == len(sizes) == len(size) or any(
                start + extent > whole
                for start, extent, whole in zip(offsets, sizes, size, strict=True)
            ):
                raise BrokenCheckpointError(f"{METADATA} has a piece of {name} outside its shape")
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        if sum(chunk.sizes.numel() for chunk in chunks) != size.numel():
            raise BrokenCheckpointError(f"{METADATA} has missing or extra pieces of {name}")
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _index(self, plain: Any) -> MetadataIndex:
        fields = _fields(plain, "MetadataIndex", "fqn")
        name = _name(fields["fqn"])
        offset, index = fields.get("offset"), fields.get("index")
        if index is not None and not _is_count(index):
            raise BrokenCheckpointError(f"{METADATA} has an invalid piece index of {name}")
        return MetadataIndex(name, None if offset is None else _size(offset, name), index)

    def _place(self, plain: Any) -> _StorageInfo:
        fields = _fields(plain, "_StorageInfo", "relative_path", "offset", "length")
        path, offset, length = fields["relative_path"], fields["offset"], fields["length"]
        if not isinstance(path, str):
            raise BrokenCheckpointError(f"{METADATA} has an invalid file name")
        if fields.get("transform_descriptors"):
            raise BrokenCheckpointError(f"{METADATA} says that {shown(path)} is compressed")
        if path not in self._file_bytes:
            if path in ("", ".", "..") or "\0" in path or Path(path).name != path:
                raise BrokenCheckpointError(f"{METADATA} names a file outside the checkpoint")
            with open_in_checkpoint(self._folder / path) as file:
                self._file_bytes[path] = file.seek(0, 2)
        if not (_is_count(offset) and _is_count(length)) or (
            offset + length > self._file_bytes[path]
        ):
            raise BrokenCheckpointError(f"{METADATA} has an invalid place in {shown(path)}")
        return _StorageInfo(path, offset, length)

    def _check_places(
        self, name: str, stored: TensorStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]
    ) -> None:
        for chunk in stored.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                raise BrokenCheckpointError(f"{METADATA} has no place for a piece of {name}")
            if chunk.sizes.numel() * stored.properties.dtype.itemsize > place.length:
                raise BrokenCheckpointError(f"{METADATA} has too few bytes for a piece of {name}")


def _kind(plain: Any) -> str:
    return plain.kind if isinstance(plain, _Plain) else ""


def _state(plain: Any, kind: str) -> Any:
    if _kind(plain) != kind:
        raise BrokenCheckpointError(f"{METADATA} lacks a {kind} object where one is expected")
    return plain.state


def _fields(plain: Any, kind: str, *needed: str) -> dict[str, Any]:
    """The state of an object of `kind` that has at least these fields."""
    state = _state(plain, kind)
    if not isinstance(state, dict) or not set(needed) <= state.keys():
        raise BrokenCheckpointError(f"{METADATA} has a {kind} without {' or '.join(needed)}")
    return state


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name or len(name) > 1000 or not name.isprintable():
        raise BrokenCheckpointError(f"{METADATA} has a tensor with an invalid name")
    return name


def _size(plain: Any, name: str) -> torch.Size:
    values: tuple[Any, ...] = plain.values if _kind(plain) == "Size" else ()
    for numbers in values[:1]:
        if (
            isinstance(numbers, tuple | list)
            and len(numbers) <= 64
            and all(map(_is_count, numbers))
        ) and math.prod(numbers) <= MOST:
            return torch.Size(numbers)
    raise BrokenCheckpointError(f"{METADATA} has an invalid size of {name}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST

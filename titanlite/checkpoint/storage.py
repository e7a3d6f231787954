"""Tensors to and from the files of a checkpoint, by torch.distributed.checkpoint (DCP).

DCP merges what the ranks hold by name and place in the whole tensor, writes each piece once, and
reads whatever part another plan asks for. Added here: where a rank's piece lies under every plan
(Piece), checksums taken as the bytes are written (HashingWriter), and a reader that takes files
from anybody (SafeReader; metadata.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.futures import Future

from titanlite.checkpoint.manifest import (
    METADATA,
    BrokenCheckpointError,
    FileRecord,
    open_in_checkpoint,
    record_of,
)
from titanlite.checkpoint.metadata import read_metadata
from titanlite.errors import TitanliteError
from titanlite.files import shown


@dataclass(frozen=True)
class Piece:
    """What one rank holds of a tensor: `local`, which begins at `offsets` in the whole `shape`.

    DTensor's protocol for DCP, except that a piece may be empty, which is then not stored.
    """

    local: Tensor
    shape: torch.Size
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """All of a plain tensor."""
        return cls(tensor, tensor.shape, (0,) * tensor.ndim)

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.local.size())]

    def __create_write_items__(self, name: str, _: Piece) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.local.dtype),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


Pieces = dict[str, Piece]
Seal = Callable[[Mapping[str, FileRecord]], None]


def save(pieces: Pieces, folder: Path, group: dist.ProcessGroup | None, seal: Seal) -> None:
    """Write the pieces of all ranks of `group` into `folder`; without a group, of this process.

    When every file is on the disk, the first rank calls `seal` with their records; all ranks
    return after that. Raises CheckpointException on every rank where any of them failed.
    """
    with _without_group_warning(group):
        dcp.save(
            cast(dict[str, Any], pieces),
            storage_writer=HashingWriter(folder, seal),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def save_async(
    pieces: Pieces, folder: Path, group: dist.ProcessGroup, seal: Seal, stager: AsyncStager
) -> Any:
    """The same from a copy that `stager` makes, in a thread; a future of concurrent.futures.

    `group` must be used by nothing else meanwhile.
    """
    return dcp.async_save(
        cast(dict[str, Any], pieces),
        storage_writer=HashingWriter(folder, seal),
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
        async_stager=stager,
    )


def load(pieces: Pieces, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the pieces of each rank of `group` from the checkpoint in `folder`.

    Every name must be there with the same shape. Raises CheckpointException on every rank where
    any of them failed.
    """
    with _without_group_warning(group):
        dcp.load(
            cast(dict[str, Any], pieces),
            storage_reader=SafeReader(folder),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def stored_tensors(
    folder: Path, files: Collection[str] | None = None
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor that DCP stored in `folder`; no code of it is run.

    Raises BrokenCheckpointError; also where one is in none of `files`, which have been checked.
    """
    metadata = read_metadata(folder)
    if files is not None:
        named = {place.relative_path for place in metadata.storage_data.values()}
        if unknown := sorted(named - set(files)):
            raise BrokenCheckpointError(
                f"{METADATA} names {shown(unknown[0])}, which is not listed"
            )
    return {
        name: (torch.Size(stored.size), stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


class _SavePlanner(DefaultSavePlanner):
    """DCP's planner over pieces; they are looked up by name."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].local


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default one looks for tensors on "meta" among what DCP itself knows.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name in self.state_dict:
            if not isinstance(
                self.metadata.state_dict_metadata.get(name), TensorStorageMetadata | None
            ):
                raise BrokenCheckpointError(f"{name} is no tensor")
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local

    def load_bytes(self, read_item: Any, value: Any) -> None:
        # The default one unpickles whatever is there.
        raise BrokenCheckpointError(f"{read_item.dest_index.fqn} is no tensor")


class HashingWriter(FileSystemWriter):
    """DCP's writer of one file a rank, flushed to the disk; calls `seal` with all checksums."""

    def __init__(self, folder: Path, seal: Seal) -> None:
        super().__init__(folder, overwrite=False)
        self._folder, self._seal = folder, seal
        self._hashing = _HashingFileSystem()
        self.fs = self._hashing

    def storage_meta(self) -> StorageMeta:
        # Without the path, which is that of an unfinished checkpoint.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        written = super().write_data(plan, planner).value()
        done: Future[Any] = Future()
        done.set_result((written, dict(self._hashing.records)))
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        """On the first rank alone, after all have written."""
        super().finish(metadata, [written for written, _ in results])
        records = {name: record for _, of_rank in results for name, record in of_rank.items()}
        self._seal({**records, METADATA: record_of(self._folder / METADATA)})


class _HashingFileSystem(FileSystem):
    """The local file system; keeps a record of each file that it wrote."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingFile(stream)
            yield hashing
            self.records[Path(path).name] = FileRecord(
                size_bytes=hashing.size_bytes, sha256=hashing.digest.hexdigest()
            )


class _HashingFile:
    """A file that is written from its start to its end, with a checksum of what was written."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.digest, self.size_bytes = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        written: int = self._file.write(data)
        self.size_bytes += memoryview(data).nbytes
        return written

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        # It is asked for to sync the file, which DCP does with the metadata before flushing it.
        self._file.flush()
        return cast(int, self._file.fileno())

    def close(self) -> None:
        self._file.close()


class SafeReader(FileSystemReader):
    """DCP's reader, for files that anybody may have written.

    It runs no code from them, reads regular files of the folder alone, and no object that is not a
    tensor. All methods raise BrokenCheckpointError.
    """

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Every value of it is checked: see metadata.py."""
        return read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Fill the plan's pieces, a tensor at a time."""
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            with open_in_checkpoint(Path(self.path) / place.relative_path) as file:
                view = self._slice_file(file, place)
                tensor = _tensor_of(view, item.storage_index, self._stored)
            part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise BrokenCheckpointError(f"{item.dest_index.fqn} is of another size")
            if target.is_floating_point() != part.is_floating_point() or part.is_complex():
                raise BrokenCheckpointError(
                    f"{item.dest_index.fqn} is of {part.dtype}, not {target.dtype}"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata: Metadata, *rest: Any, **named: Any) -> None:
        super().set_up_storage_reader(metadata, *rest, **named)
        self._stored = metadata.state_dict_metadata


def _tensor_of(file: IO[bytes], index: MetadataIndex, stored: Mapping[str, Any]) -> Tensor:
    """The piece of a tensor that `file`, written by torch.save, has to be."""
    try:
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # anything can come out of bytes that were altered
        # torch's own words advise to load it in a way that would run code.
        raise BrokenCheckpointError(f"what is stored of {index.fqn} cannot be read") from None
    what = stored[index.fqn]
    sizes = {chunk.offsets: chunk.sizes for chunk in what.chunks}[index.offset]
    if (
        not isinstance(tensor, Tensor)
        or tensor.layout != torch.strided
        or (tensor.dtype, tensor.size()) != (what.properties.dtype, sizes)
    ):
        raise BrokenCheckpointError(f"what is stored of {index.fqn} is not what {METADATA} says")
    return tensor


@contextlib.contextmanager
def _without_group_warning(group: dist.ProcessGroup | None) -> Iterator[None]:
    """DCP warns that it works in one process, also where that was asked for."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The rank that failed, and how, out of DCP's account of all."""
    rank, (cause, _) = min(error.failures.items())
    return rank, cause


def first_cause(error: BaseException) -> BaseException:
    """What failed first, where DCP raised `error`; else the error itself."""
    return first_failure(error)[1] if isinstance(error, CheckpointException) else error


def told(error: BaseException) -> str:
    """What went wrong, on one line: the system's words, or the error's own."""
    text = getattr(error, "strerror", None) or str(error)
    name = "" if isinstance(error, OSError | TitanliteError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{text}".split())

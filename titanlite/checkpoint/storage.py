"""Tensors to and from the files of a checkpoint, by torch.distributed.checkpoint (DCP).

DCP identifies a shard by its tensor's name and its offsets, writes each shard once, and reads the
parts that another plan needs. Added here: the offsets of a rank's shard under every plan (Piece),
checksums computed while the bytes are written (HashingWriter), and a reader for untrusted files
(SafeReader; metadata.py).
"""

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
from titanlite.ranks.temporary import failed_writes


@dataclass(frozen=True)
class Piece:
    """One rank's shard of a tensor: `local`, at `offsets` in the unsharded tensor of `shape`.

    It has the same DCP methods as DTensor, except that a piece may be empty: then it is not stored.
    """

    local: Tensor
    shape: torch.Size
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> "Piece":
        """A plain tensor as one piece."""
        return cls(tensor, tensor.shape, (0,) * tensor.ndim)

    def size(self) -> torch.Size:
        return self.shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.local.numel() == 0:
            return []
        return [ChunkStorageMetadata(torch.Size(self.offsets), self.local.size())]

    def __create_write_items__(self, name: str, _: "Piece") -> list[WriteItem]:
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
    """Write the pieces of all ranks of `group` to `folder`; without a group, of this process.

    When all files are on the disk, the first rank calls `seal` with their records; after that all
    ranks return. Raises CheckpointException on every rank if any rank failed.
    """
    is_on_gpu = any(piece.local.is_cuda for piece in pieces.values())
    with _without_group_warning(group):
        dcp.save(
            cast(dict[str, Any], pieces),
            storage_writer=HashingWriter(folder, seal, copies_ahead=is_on_gpu),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def save_async(
    pieces: Pieces, folder: Path, group: dist.ProcessGroup | None, seal: Seal, stager: AsyncStager
) -> Any:
    """Like `save`, in a thread, from a copy by `stager`; returns a concurrent.futures.Future.

    Nothing else may use `group` until the future is done.
    """
    return dcp.async_save(
        cast(dict[str, Any], pieces),
        storage_writer=HashingWriter(folder, seal),
        planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        process_group=group,
        async_stager=stager,
    )


def load(
    pieces: Pieces, folder: Path, group: dist.ProcessGroup | None, metadata: Metadata | None = None
) -> None:
    """Fill the pieces of each rank of `group` from the checkpoint in `folder`.

    `metadata` is what `read_metadata` returns for it; it is read here if it is None. Every name
    must be in the checkpoint, with the same shape. Raises CheckpointException on every rank if any
    rank failed.
    """
    with _without_group_warning(group):
        dcp.load(
            cast(dict[str, Any], pieces),
            storage_reader=SafeReader(folder, metadata),
            planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )


def stored_tensors(
    folder: Path, files: Collection[str] | None = None
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of each tensor that DCP stored in `folder`; runs no code from its files.

    Raises BrokenCheckpointError, also for a tensor in a file that is not one of `files`.
    """
    return tensors_in(read_metadata(folder), files)


def tensors_in(
    metadata: Metadata, files: Collection[str] | None = None
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """`stored_tensors` of a checkpoint whose metadata has been read."""
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
    """DCP's planner for pieces, which are looked up by name."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].local


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default method searches for meta tensors, and does not know pieces.
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        for name in self.state_dict:
            if not isinstance(stored.get(name), TensorStorageMetadata | None):
                raise BrokenCheckpointError(f"{name} is not a tensor")
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local

    def load_bytes(self, read_item: Any, value: Any) -> None:
        # The default method unpickles the bytes.
        raise BrokenCheckpointError(f"{read_item.dest_index.fqn} is not a tensor")


class HashingWriter(FileSystemWriter):
    """DCP's writer, one file per rank, flushed to the disk; calls `seal` with all checksums.

    With `copies_ahead`, tensors (10 MB, as by default) are copied from the GPU while others are
    written. DCP asks for a CUDA stream for that, even if all tensors are on the CPU.
    """

    def __init__(self, folder: Path, seal: Seal, *, copies_ahead: bool = False) -> None:
        super().__init__(folder, overwrite=False, per_thread_copy_ahead=10_000_000 * copies_ahead)
        self._folder, self._seal = folder, seal
        self._hashing = _HashingFileSystem()
        self.fs = self._hashing

    def storage_meta(self) -> StorageMeta:
        # Omits the path, which is the temporary one.
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[Any]:
        written = super().write_data(plan, planner).value()
        done: Future[Any] = Future()
        done.set_result((written, dict(self._hashing.records)))
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Called only on the first rank, when all ranks have written."""
        super().finish(metadata, [written for written, _ in results])
        records = {name: record for _, of_rank in results for name, record in of_rank.items()}
        self._seal({**records, METADATA: record_of(self._folder / METADATA)})


class _HashingFileSystem(FileSystem):
    """The local file system; keeps a record of each file that it writes."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = _HashingFile(stream)
            with failed_writes():
                yield hashing
            self.records[Path(path).name] = FileRecord(
                size_bytes=hashing.size_bytes, sha256=hashing.digest.hexdigest()
            )


class _HashingFile:
    """A file that is written sequentially, with a checksum of the bytes."""

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
        # DCP calls this to fsync .metadata, before it flushes it.
        self._file.flush()
        return cast(int, self._file.fileno())

    def close(self) -> None:
        self._file.close()


class SafeReader(FileSystemReader):
    """DCP's reader for untrusted files.

    It runs no code from them, opens only regular files of the folder, and loads only tensors. All
    methods raise BrokenCheckpointError.
    """

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata, with every value checked: see metadata.py."""
        return self._metadata or read_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Fill the pieces of the plan, one tensor at a time."""
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            with open_in_checkpoint(Path(self.path) / place.relative_path) as file:
                view = self._slice_file(file, place)
                stored = planner.metadata.state_dict_metadata
                tensor = _tensor_of(view, item.storage_index, stored)
            part = narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            if target.size() != part.size():
                raise BrokenCheckpointError(f"{item.dest_index.fqn} has another size")
            if target.is_floating_point() != part.is_floating_point() or part.is_complex():
                raise BrokenCheckpointError(
                    f"{item.dest_index.fqn} has dtype {part.dtype}, not {target.dtype}"
                )
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _tensor_of(file: IO[bytes], index: MetadataIndex, stored: Mapping[str, Any]) -> Tensor:
    """Load the piece of a tensor in `file`; raises BrokenCheckpointError if it is invalid."""
    try:
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # altered bytes can raise anything
        # torch's message is dropped: it suggests a way of loading that runs code.
        raise BrokenCheckpointError(f"the data of {index.fqn} cannot be read") from None
    what = stored[index.fqn]
    sizes = {chunk.offsets: chunk.sizes for chunk in what.chunks}[index.offset]
    if (
        not isinstance(tensor, Tensor)
        or tensor.layout != torch.strided
        or (tensor.dtype, tensor.size()) != (what.properties.dtype, sizes)
    ):
        raise BrokenCheckpointError(f"the data of {index.fqn} does not match {METADATA}")
    return tensor


@contextlib.contextmanager
def _without_group_warning(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Suppress DCP's warning that it runs in one process, if that is intended."""
    with warnings.catch_warnings():
        if group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """The lowest rank that failed, and its error."""
    rank, (cause, _) = min(error.failures.items())
    return rank, cause


@contextlib.contextmanager
def naming_rank(what: str) -> Iterator[None]:
    """Raise what DCP raises inside as one line: `what`, the lowest rank that failed, and why."""
    try:
        yield
    except CheckpointException as error:
        rank, cause = first_failure(error)
        raise TitanliteError(f"{what} failed on rank {rank}: {cause_line(cause)}") from error


def cause_line(error: BaseException) -> str:
    """The message of an error, on one line; for an OSError, the system's message."""
    text = getattr(error, "strerror", None) or str(error)
    name = "" if isinstance(error, OSError | TitanliteError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{text}".split())

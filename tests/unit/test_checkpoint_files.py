"""A folder of checkpoints, and what keeps one from being used: without ranks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from titanlite.checkpoint.folder import CheckpointFolder, find_checkpoint, look_at
from titanlite.checkpoint.manifest import (
    MANIFEST,
    BrokenCheckpointError,
    Manifest,
    _digest,
    check_files,
    read_manifest,
    record_of,
)
from titanlite.checkpoint.storage import METADATA, Piece, load, save, stored_tensors
from titanlite.errors import ConfigError

TENSORS = {"model.a": torch.arange(6.0).view(2, 3), "model.b": torch.tensor(3.0)}


def manifest(step: int, serial: int, holds: str = "training", **files) -> Manifest:
    return Manifest(
        step=step,
        serial=serial,
        holds=holds,
        stored_as="dcp",
        shapes={"a": [2, 3]},
        dtype="float32",
        plan="one rank",
        num_ranks=1,
        config={"training": {"max_norm": float("inf")}},
        titanlite="0",
        torch="0",
        files=files,
    )


def put(folder: CheckpointFolder, step: int, text: str = "data", holds: str = "training") -> Path:
    """A checkpoint of one file."""
    path = folder.unfinished(step, "run")
    path.mkdir(parents=True)
    (path / "data").write_text(text)
    made = manifest(step, folder.next_serial(), holds, data=record_of(path / "data"))
    folder.commit(path, folder.at(step), made, "run")
    return folder.at(step)


def write_tensors(path: Path) -> None:
    records = {}
    pieces = {name: Piece.whole(tensor) for name, tensor in TENSORS.items()}
    save(pieces, path, None, records.update)
    (path / MANIFEST).write_text(manifest(1, 1, **records).to_json())


def names(folder: CheckpointFolder) -> list[str]:
    return [found.path.name for found in folder.newest_first()]


def test_the_newest_is_the_last_written_whatever_its_step(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20, 30, 15):
        put(folder, step)
    assert names(folder) == ["step-15", "step-30", "step-20", "step-10"]
    (tmp_path / "step-20" / MANIFEST).write_text("{")
    # Its serial is not known. Step 15 is older than it, or newer: it is refused aloud.
    assert names(folder) == ["step-20", "step-15", "step-30", "step-10"]
    (tmp_path / "step-15" / MANIFEST).unlink()
    assert names(folder) == ["step-30", "step-20", "step-15", "step-10"]


def test_the_same_step_again_takes_the_place_of_the_first(tmp_path):
    folder = CheckpointFolder(tmp_path)
    put(folder, 10, text="old")
    put(folder, 10, text="new")
    assert (tmp_path / "step-10" / "data").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


def test_only_as_many_as_asked_for_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20, 30, 40):
        put(folder, step)
    (tmp_path / "step-40" / MANIFEST).unlink()
    folder.keep_latest(0, "run")
    assert len(names(folder)) == 4
    folder.keep_latest(2, "run")
    # One that is broken does not count.
    assert names(folder) == ["step-40", "step-30", "step-20"]


def test_the_last_that_a_run_can_go_on_from_is_kept(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step, holds in ((10, "training"), (20, "training"), (30, "weights"), (40, "weights")):
        put(folder, step, holds=holds)
    folder.keep_latest(1, "run")
    assert names(folder) == ["step-40", "step-20"]


def test_what_a_killed_run_left_is_cleared_away(tmp_path):
    folder = CheckpointFolder(tmp_path)
    whole = put(folder, 10)
    put(folder, 20).rename(tmp_path / "step-20.replaced-0123abcd")
    left = ("step-30.new-0123abcd", "step-5.removed-0123abcd", "step-10.replaced-0123abcd")
    own = ["notes", "step-9.new-best"]
    for name in (*left, *own):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    folder.clean()
    # What had only been set aside, when nothing had taken its place yet, is back.
    assert {path.name for path in tmp_path.iterdir()} == {*own, "step-10", "step-20"}
    assert look_at(whole).manifest is not None


def test_a_link_goes_and_what_it_leads_to_stays(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoint")
    put(folder, 10).rename(tmp_path / "elsewhere")
    folder.at(10).symlink_to(tmp_path / "elsewhere")
    put(folder, 20)
    folder.keep_latest(1, "run")
    assert [path.name for path in folder.path.iterdir()] == ["step-20"]
    assert (tmp_path / "elsewhere" / MANIFEST).exists()


def test_a_file_with_the_name_of_a_checkpoint_is_in_the_way(tmp_path):
    folder = CheckpointFolder(tmp_path)
    put(folder, 10)
    assert folder.in_the_way() is None
    folder.at(20).touch()
    assert folder.in_the_way() == folder.at(20)


def test_a_folder_is_held_by_one_run(tmp_path, monkeypatch):
    folder, other = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    monkeypatch.setattr("titanlite.checkpoint.folder.PATIENCE_SECONDS", 0)
    for _ in range(2):
        with (
            folder.holding(),
            pytest.raises(ConfigError, match="another run is using"),
            other.holding(),
        ):
            pytest.fail("both hold it")

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder.holding(), other.holding():
        assert list(tmp_path.iterdir()) == []


def test_what_is_no_manifest_or_metadata_is_refused(tmp_path):
    put(CheckpointFolder(tmp_path), 10)
    path = tmp_path / "step-10" / MANIFEST
    whole = json.loads(path.read_text())
    whole.pop("sha256")
    lacking = {name: value for name, value in whole.items() if name != "files"}
    for content in (
        lacking,
        whole | {"more": 1},
        whole | {"files": 1},
        whole | {"files": {"a": 1}},
    ):
        path.write_text(json.dumps({"sha256": _digest(content), **content}))
        with pytest.raises(BrokenCheckpointError, match="lacks something, or has too much"):
            read_manifest(path.parent)
    write_tensors(tmp_path / "step-1")
    metadata = pickle.loads((tmp_path / "step-1" / METADATA).read_bytes())
    for places in (dict.fromkeys(metadata.storage_data, 1), 1):
        metadata.storage_data = places
        (tmp_path / "step-1" / METADATA).write_bytes(pickle.dumps(metadata))
        with pytest.raises(BrokenCheckpointError, match="does not say which file holds what"):
            stored_tensors(tmp_path / "step-1")


def test_a_manifest_of_another_step_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    put(folder, 10).rename(tmp_path / "step-20")
    assert look_at(tmp_path / "step-20").reason == "manifest.json is of step 10"
    with pytest.raises(ConfigError, match=r"step-20 is refused: manifest.json is of step 10"):
        find_checkpoint(tmp_path / "step-20")
    with pytest.raises(ConfigError, match="is no checkpoint, nor a folder of them"):
        find_checkpoint(tmp_path / "nothing")


def test_every_flipped_byte_of_a_manifest_is_seen(tmp_path):
    put(CheckpointFolder(tmp_path), 10)
    path = tmp_path / "step-10" / MANIFEST
    whole = path.read_bytes()
    values = json.loads(whole)
    assert read_manifest(path.parent).step == 10
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            altered = json.loads(path.read_bytes())
        except ValueError:
            altered = None
        if altered != values:
            with pytest.raises(BrokenCheckpointError):
                read_manifest(path.parent)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA])
def test_every_file_is_checked(tmp_path, name):
    write_tensors(tmp_path / "step-1")
    path = tmp_path / "step-1"
    files = read_manifest(path).files
    assert set(files) == {"__0_0.distcp", METADATA}
    check_files(path, files, files)
    whole = (path / name).read_bytes()
    middle = len(whole) // 2
    for altered, said in (
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "as it was written"),
        (whole[:-1], f"has {len(whole) - 1:,} bytes, not {len(whole):,}"),
        (None, "is missing"),
    ):
        (path / name).unlink()
        if altered is not None:
            (path / name).write_bytes(altered)
        with pytest.raises(BrokenCheckpointError, match=said):
            check_files(path, files, files)


def test_tensors_come_back_in_any_cut(tmp_path):
    write_tensors(tmp_path)
    assert stored_tensors(tmp_path)["model.a"] == (torch.Size([2, 3]), torch.float32)
    part = torch.zeros(1, 2)
    empty = torch.zeros(0, 3)
    load(
        {
            "model.a": Piece(part, torch.Size([2, 3]), (1, 1)),
            "model.b": Piece(empty, torch.Size([]), ()),
        },
        tmp_path,
        None,
    )
    assert torch.equal(part, TENSORS["model.a"][1:, 1:])


def test_what_is_synced_has_been_flushed(tmp_path, monkeypatch):
    synced: dict[int, int] = {}

    def fsync(descriptor: int) -> None:
        about = os.fstat(descriptor)
        synced[about.st_ino] = about.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    write_tensors(tmp_path)
    for name, record in read_manifest(tmp_path).files.items():
        assert synced[(tmp_path / name).stat().st_ino] == record.size_bytes, name


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_metadata_that_would_run_code_is_refused(tmp_path):
    write_tensors(tmp_path)
    mark = tmp_path / "it-ran"
    text = pickle.dumps(Evil(mark))
    (tmp_path / METADATA).write_bytes(text)
    with pytest.raises(BrokenCheckpointError, match=r"asks for posix\.mkdir, which is not"):
        stored_tensors(tmp_path)
    assert not mark.exists()
    # The same bytes do run where they are trusted.
    pickle.loads(text)
    assert mark.exists()


def test_tensors_that_would_run_code_are_refused(tmp_path):
    write_tensors(tmp_path)
    mark = tmp_path / "it-ran"
    torch.save(Evil(mark), tmp_path / "evil")
    evil = (tmp_path / "evil").read_bytes()
    path = tmp_path / "__0_0.distcp"
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(evil)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    path.write_bytes(evil)
    pieces = {name: Piece.whole(torch.zeros_like(tensor)) for name, tensor in TENSORS.items()}
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        load(pieces, tmp_path, None)
    assert not mark.exists()


def test_metadata_that_leads_elsewhere_or_to_objects_is_refused(tmp_path):
    write_tensors(tmp_path)
    whole = (tmp_path / METADATA).read_bytes()
    metadata = pickle.loads(whole)
    for stored in metadata.storage_data.values():
        stored.relative_path = "../secret"
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(BrokenCheckpointError, match="names a file outside the checkpoint"):
        stored_tensors(tmp_path)
    metadata = pickle.loads(whole)
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata.state_dict_metadata["model.b"] = BytesStorageMetadata()
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match=r"model\.b is no tensor"):
        load({"model.b": Piece.whole(torch.zeros(()))}, tmp_path, None)
    (tmp_path / METADATA).write_bytes(struct.pack("<Q", 7))
    with pytest.raises(BrokenCheckpointError, match="cannot be read"):
        stored_tensors(tmp_path)

"""A folder of checkpoints, and what keeps one from being used: without ranks."""

import errno
import fcntl
import json
import os
import pickle
import resource
import struct
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from titanlite.checkpoint.folder import CheckpointFolder, look_at
from titanlite.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    BrokenCheckpointError,
    Manifest,
    _digest,
    check_files,
    read_manifest,
    record_of,
)
from titanlite.checkpoint.storage import Piece, first_failure, load, save, stored_tensors
from titanlite.errors import ConfigError
from titanlite.ranks.temporary import save_temporary
from titanlite.tools.convert.stored import find_checkpoint

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
        state=STATE if holds == "training" else None,
        files=files,
    )


STATE = {"lr_scheduler": 1, "dataloader": 8, "optimizer": {"name": "AdamW", "settings": {}}}


def put(folder: CheckpointFolder, step: int, text: str = "data", holds: str = "training") -> Path:
    """A checkpoint whose files hold `text`."""
    path = folder.unfinished(step, "run")
    path.mkdir(parents=True)
    records = {}
    for name in (METADATA, "__0_0.distcp"):
        (path / name).write_text(text)
        records[name] = record_of(path / name)
    made = manifest(step, folder.next_serial(), holds, **records)
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
    assert (tmp_path / "step-10" / METADATA).read_text() == "new"
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


WRONG_VALUES = [
    ({"files": None}, "files: field required"),
    ({"more": 1}, "more: extra inputs are not permitted"),
    ({"step": -1}, "step: input should be greater than or equal to 0"),
    ({"step": True}, "step: input should be a valid integer"),
    ({"serial": 0}, "serial: input should be greater than or equal to 1"),
    ({"serial": 10**30}, "serial: "),
    ({"num_ranks": 0}, "num_ranks: "),
    ({"holds": "code"}, "holds: input should be 'training' or 'weights'"),
    ({"plan": "a\x1b[2Jb"}, "plan: has characters that cannot be printed"),
    ({"plan": "x" * 1001}, "plan: "),
    ({"torch": 2}, "torch: input should be a valid string"),
    ({"shapes": {}}, "shapes: "),
    ({"shapes": {"a": [-2, 3]}}, "shapes.a.0: "),
    ({"shapes": {"a": [2.0]}}, "shapes.a.0: "),
    ({"shapes": {"a\nb": [2]}}, r"shapes.a\nb: has characters that cannot be printed"),
    ({"config": {"model": 1}}, "config.model: "),
    ({"config": []}, "config: "),
    ({"files": {}}, "files lacks .metadata, or any .distcp file"),
    ({"files": 1}, "files: "),
    ({"files": {"a": 1}}, "files.a: "),
    ({"state": {}}, "state.lr_scheduler: field required"),
    ({"state": 3}, "state: "),
    ({"state": STATE | {"lr_scheduler": -40}}, "state.lr_scheduler: "),
    ({"state": STATE | {"lr_scheduler": 1.5}}, "state.lr_scheduler: "),
    ({"state": STATE | {"dataloader": -8}}, "state.dataloader: "),
    ({"state": STATE | {"dataloader": 2**60}}, "state.dataloader: "),
    ({"state": STATE | {"optimizer": "AdamW"}}, "state.optimizer: "),
    ({"state": STATE | {"more": 1}}, "state.more: "),
    ({"holds": "weights"}, "state must be there if, and only if, the training state is held"),
    ({"stored_as": "safetensors"}, "a .safetensors file holds only weights"),
    (
        {"stored_as": "safetensors", "holds": "weights", "state": None},
        "files must list only model.safe",
    ),
]
OUTSIDE = [
    "../secret",
    "/etc/passwd",
    "a/b",
    "..",
    ".",
    "",
    "a\\b",
    "a\0b",
    "manifest.json",
    "x" * 256,
]


def reseal(folder: Path, **changes: object) -> None:
    """Change values of a manifest, so that its checksum is right; None takes one away."""
    content = json.loads((folder / MANIFEST).read_text()) | changes
    content = {k: v for k, v in content.items() if v is not None and k != "sha256"}
    (folder / MANIFEST).write_text(json.dumps({"sha256": _digest(content), **content}))


def test_a_manifest_of_wrong_values_is_one_line(tmp_path):
    path = put(CheckpointFolder(tmp_path), 10)
    whole = (path / MANIFEST).read_bytes()
    record = json.loads(whole)["files"][METADATA]
    outside = [({"files": {name: record}}, "files.") for name in OUTSIDE]
    records = [
        ({"files": {METADATA: record | changes}}, f"files.{METADATA}.{name}")
        for name, changes in (
            ("sha256", {"sha256": "0" * 63}),
            ("size_bytes", {"size_bytes": -1}),
            ("size_bytes", {"size_bytes": "4"}),
        )
    ]
    for changes, said in [*WRONG_VALUES, *outside, *records]:
        (path / MANIFEST).write_bytes(whole)
        reseal(path, **changes)
        found = look_at(path)
        assert found.manifest is None, changes
        assert found.reason.startswith(f"manifest.json: {said}"), f"{changes}: {found.reason}"
        assert found.reason.isprintable()
        assert len(found.reason) < 300
    for text in (b"[" * 100_000, b"\xff", b"1" * 5000, b"[]", b"null", b""):
        (path / MANIFEST).write_bytes(text)
        assert look_at(path).reason == "manifest.json is corrupt"


@pytest.mark.parametrize("name", [MANIFEST, METADATA, "__0_0.distcp"])
def test_what_is_no_file_of_the_folder_is_not_opened(tmp_path, name):
    write_tensors(tmp_path / "step-1")
    path = tmp_path / "step-1" / name
    path.rename(tmp_path / "elsewhere")
    places = [
        (lambda: os.mkfifo(path), "is a pipe or a device"),
        (lambda: path.symlink_to(tmp_path / "elsewhere"), "is a link"),
        (lambda: path.symlink_to("/dev/zero"), "is a link"),
        (lambda: path.symlink_to("/dev/stdin"), "is a link"),
        (lambda: path.mkdir(), "is a folder"),
    ]
    for make, said in places:
        make()
        found = look_at(tmp_path / "step-1")
        if name == MANIFEST:
            assert f"{name}: {said}" in found.reason
        else:
            files = found.manifest.files
            with pytest.raises(BrokenCheckpointError, match=f"{name} {said}"):
                check_files(found.path, files, files)
            with pytest.raises(BrokenCheckpointError, match=f"{name} {said}"):
                stored_tensors(found.path)
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "elsewhere").rename(path)
    assert stored_tensors(tmp_path / "step-1").keys() == TENSORS.keys()


def test_a_file_of_another_size_is_known_without_reading_it(tmp_path):
    write_tensors(tmp_path / "step-1")
    files = read_manifest(tmp_path / "step-1").files
    # Reading it would take an hour.
    os.truncate(tmp_path / "step-1" / "__0_0.distcp", 2**43)
    with pytest.raises(BrokenCheckpointError, match=r"has 8,796,093,022,208 bytes, not"):
        check_files(tmp_path / "step-1", files, files)


def test_a_manifest_of_another_step_is_refused(tmp_path):
    folder = CheckpointFolder(tmp_path)
    put(folder, 10).rename(tmp_path / "step-20")
    assert look_at(tmp_path / "step-20").reason == "manifest.json has step 10"
    with pytest.raises(ConfigError, match=r"step-20 cannot be used: manifest.json has step 10"):
        find_checkpoint(tmp_path / "step-20")
    with pytest.raises(ConfigError, match="is neither a checkpoint nor a folder of them"):
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
        (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], "is corrupt"),
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


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names a descriptor by /proc")
def test_a_checkpoint_gets_its_name_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    done: list[tuple[str, str]] = []
    rename = Path.rename

    def fsync(descriptor: int) -> None:
        done.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def renamed(path: Path, target: Path) -> Path:
        done.append(("rename", Path(target).name))
        return rename(path, target)

    write_tensors(tmp_path / "another")
    manifest = read_manifest(tmp_path / "another")
    (unfinished := tmp_path / "step-2.new-0").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    folder = CheckpointFolder(tmp_path)
    folder.commit(unfinished, folder.at(2), manifest, "0")
    flushed = [("flush", MANIFEST), ("flush", unfinished.name)]
    assert done == [*flushed, ("rename", "step-2"), ("flush", tmp_path.name)]


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
    with pytest.raises(BrokenCheckpointError, match=r"refers to posix\.mkdir, which is not"):
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
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for stored in metadata.storage_data.values():
        stored.offset, stored.length = 0, len(evil)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    (tmp_path / "__0_0.distcp").write_bytes(evil)
    with pytest.raises(CheckpointException) as raised:
        load_all(tmp_path)
    assert first_failure(raised.value)[1].args == ("the data of model.a cannot be read",)
    # What torch says of it is how to run the code.
    assert "weights_only" not in str(raised.value)
    assert not mark.exists()


def load_all(path: Path) -> None:
    load({n: Piece.whole(torch.zeros_like(t)) for n, t in TENSORS.items()}, path, None)


def test_tensors_that_are_others_than_the_metadata_says_are_refused(tmp_path):
    write_tensors(tmp_path)
    whole = pickle.loads((tmp_path / METADATA).read_bytes())
    others = [
        torch.zeros(3, 2),
        torch.zeros(2, 3).double(),
        torch.zeros(2, 3).to_sparse(),
        {"a": torch.zeros(2, 3)},
        torch.zeros(1).expand(2**40),
        [],
    ]
    for number, other in enumerate(others):
        torch.save(other, tmp_path / "__0_0.distcp")
        size = (tmp_path / "__0_0.distcp").stat().st_size
        for stored in whole.storage_data.values():
            stored.offset, stored.length = 0, size
        (tmp_path / METADATA).write_bytes(pickle.dumps(whole))
        with pytest.raises(CheckpointException) as raised:
            load_all(tmp_path)
        said = str(first_failure(raised.value)[1])
        # From torch 2.14 on, reading weights alone refuses a sparse tensor by itself.
        wrong = ("does not match .metadata", "cannot be read")
        words = wrong if number == 2 else wrong[:1]
        assert said in [f"the data of model.a {what}" for what in words], number


def storage(metadata: Metadata, **values: object) -> None:
    for stored in metadata.storage_data.values():
        vars(stored).update(values)


def tensor(metadata: Metadata, **values: object) -> None:
    vars(metadata.state_dict_metadata["model.a"]).update(values)


def chunk(metadata: Metadata, **values: object) -> None:
    vars(metadata.state_dict_metadata["model.a"].chunks[0]).update(values)


def rename(metadata: Metadata, name: object) -> None:
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata["model.a"]


def polluting(metadata: Metadata) -> bytes:
    """A pickle that would set an attribute of the class itself, for all who use it after."""
    head = b"ctorch.distributed.checkpoint.metadata\nTensorStorageMetadata\n"
    return head + b"(N}X\x04\x00\x00\x00sizeK\x01stb."


SIZE = torch.Size
WRONG_METADATA = [
    (lambda m: storage(m, relative_path="../secret"), "names a file outside the checkpoint"),
    (lambda m: storage(m, relative_path="/etc/passwd"), "names a file outside the checkpoint"),
    (lambda m: storage(m, relative_path=""), "names a file outside the checkpoint"),
    (lambda m: storage(m, relative_path="a\0b"), "names a file outside the checkpoint"),
    (lambda m: storage(m, relative_path=3), "has an invalid file name"),
    (lambda m: storage(m, relative_path="not-there"), "not-there is missing"),
    (lambda m: storage(m, offset=-1), "has an invalid place in __0_0.distcp"),
    (lambda m: storage(m, offset=10**30), "has an invalid place in __0_0.distcp"),
    (lambda m: storage(m, length=2**62), "has an invalid place in __0_0.distcp"),
    (lambda m: storage(m, length="x"), "has an invalid place in __0_0.distcp"),
    (lambda m: storage(m, length=4), "has too few bytes for a piece of model.a"),
    (lambda m: storage(m, transform_descriptors=["zstd"]), "says that __0_0.distcp is compressed"),
    (lambda m: m.storage_data.clear(), "has no place for a piece of model.a"),
    (lambda m: setattr(m, "storage_data", 1), "has no valid list of files"),
    (lambda m: setattr(m, "storage_data", None), "has no valid list of files"),
    (lambda m: m.storage_data.update(a=1), "lacks a MetadataIndex object where one is expected"),
    (lambda m: setattr(m, "state_dict_metadata", []), "has no metadata"),
    (lambda m: m.state_dict_metadata.update(a=1), "lacks a TensorStorageMetadata object"),
    (lambda m: rename(m, "a\x1b[2J"), "has a tensor with an invalid name"),
    (lambda m: rename(m, 7), "has a tensor with an invalid name"),
    (lambda m: rename(m, "x" * 2000), "has a tensor with an invalid name"),
    (lambda m: tensor(m, size=SIZE([2**40, 2**40])), "has an invalid size of model.a"),
    (lambda m: tensor(m, size=SIZE([-2, 3])), "has an invalid size of model.a"),
    (lambda m: tensor(m, size=(2, 3)), "has an invalid size of model.a"),
    (lambda m: tensor(m, size=SIZE([1] * 65)), "has an invalid size of model.a"),
    (lambda m: tensor(m, size=SIZE([2**31, 3])), "has missing or extra pieces of model.a"),
    (lambda m: tensor(m, chunks=[]), "has missing or extra pieces of model.a"),
    (lambda m: tensor(m, chunks=None), "has no valid list of pieces of model.a"),
    (lambda m: tensor(m, properties=None), "lacks a TensorProperties object where one is"),
    (lambda m: chunk(m, offsets=SIZE([1, 0])), "has a piece of model.a outside its shape"),
    (lambda m: chunk(m, sizes=SIZE([6])), "has a piece of model.a outside its shape"),
    (polluting, "cannot be read"),
    (lambda m: struct.pack("<Q", 7), "cannot be read"),
    (lambda m: b"", "cannot be read"),
    (lambda m: pickle.dumps([]), "lacks a Metadata object where one is expected"),
    (lambda m: pickle.dumps(torch.float32), "lacks a Metadata object where one is expected"),
    (lambda m: b"(" * 10**5 + b"t" * 10**5 + b".", "lacks a Metadata object where one is expected"),
    (lambda m: b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "cannot be read"),
]


@pytest.mark.parametrize(("change", "said"), WRONG_METADATA)
def test_metadata_of_wrong_values_is_one_line(tmp_path, change, said):
    write_tensors(tmp_path)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    content = change(metadata)
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata) if content is None else content)
    with pytest.raises(BrokenCheckpointError) as raised:
        stored_tensors(tmp_path)
    line = str(raised.value)
    assert said in line
    assert line.isprintable()
    # Nothing of it stays in this process.
    write_tensors(tmp_path / "next")
    assert stored_tensors(tmp_path / "next").keys() == TENSORS.keys()


def test_metadata_that_names_objects_or_files_not_listed_is_refused(tmp_path):
    write_tensors(tmp_path)
    files = read_manifest(tmp_path).files
    whole = (tmp_path / METADATA).read_bytes()
    metadata = pickle.loads(whole)
    metadata.state_dict_metadata["model.b"] = BytesStorageMetadata()
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match=r"model\.b is not a tensor"):
        load({"model.b": Piece.whole(torch.zeros(()))}, tmp_path, None)
    metadata = pickle.loads(whole)
    (tmp_path / "more").write_bytes((tmp_path / "__0_0.distcp").read_bytes())
    storage(metadata, relative_path="more")
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(BrokenCheckpointError, match="names more, which is not listed"):
        stored_tensors(tmp_path, files)


class ByName:
    """An attribute that is pickled as Python 3.11.0 to 3.11.3 pickle members of enums."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_a_member_of_an_enum_may_be_pickled_by_name() -> None:
    import io
    import pickle

    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata

    from titanlite.checkpoint.metadata import _Unpickler

    def load(owner: object, name: str):
        return _Unpickler(io.BytesIO(pickle.dumps(ByName(owner, name)))).load()

    assert load(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT").values == (2,)
    for owner, name in (
        (_MEM_FORMAT_ENCODING, "__init__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (ChunkStorageMetadata, "__init__"),
    ):
        with pytest.raises(BrokenCheckpointError, match="getattr of another object"):
            load(owner, name)


@pytest.mark.parametrize("limit", range(0, 44_000, 2_600))
def test_a_full_disk_is_known_wherever_a_file_ends(tmp_path, limit):
    """After a failed write torch.save fails once more, with an error that hides the disk's."""
    pieces = {str(number): Piece.whole(torch.zeros(number)) for number in (3000, 3700, 4400)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointException) as raised:
            save(pieces, tmp_path / "step-1", None, lambda records: None)
        assert isinstance(first_failure(raised.value)[1], OSError)
        with pytest.raises(ConfigError, match=r"x\.pt cannot be written: File too large; free"):
            save_temporary(torch.zeros(20_000), tmp_path / "x.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_torch_save_is_called_in_one_module():
    library = Path(__file__).parents[3] / "titanlite"
    writers = [path for path in library.rglob("*.py") if "torch.save(" in path.read_text()]
    assert writers == [library / "ranks/temporary.py"]

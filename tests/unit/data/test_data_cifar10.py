"""CIFAR-10 from disk: both formats hold the same images, and no pickle can run code."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titanlite.data.images.cifar10 import build_cifar10, load_plain_pickle
from titanlite.data.spec import Dataset
from titanlite.errors import ConfigError

NAMES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
IMAGES_A_FILE = 4


def make_images(file_number: int) -> np.ndarray:
    draw = np.random.default_rng(file_number)
    return draw.integers(0, 256, (IMAGES_A_FILE, 3072), dtype=np.uint8)


def write_python(folder: Path) -> Path:
    folder = folder / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate((*NAMES, "test_batch")):
        labels = list(range(IMAGES_A_FILE))
        batch = {b"data": make_images(number), b"labels": labels, b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


def write_binary(folder: Path) -> Path:
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate((*NAMES, "test_batch")):
        labels = np.arange(IMAGES_A_FILE, dtype=np.uint8)[:, None]
        records = np.concatenate([labels, make_images(number)], axis=1)
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder


def build(path: Path | str, split: str = "train", **changes: Any) -> Dataset:
    shape = {"height": 32, "width": 32, "channels": 3, "vocab_size": 256, **changes}
    return build_cifar10(path=str(path), split=split, seed=0, **shape)


@pytest.mark.parametrize("write", [write_python, write_binary])
@pytest.mark.parametrize("where", ["itself", "parent"])
def test_both_formats_give_the_files_images(tmp_path: Path, write: Any, where: str) -> None:
    folder = write(tmp_path)
    path = folder if where == "itself" else tmp_path
    train, validation = build(path), build(path, "validation")
    assert train.num_samples == 5 * IMAGES_A_FILE
    assert torch.equal(validation.sample(1), torch.from_numpy(make_images(5)[1].astype(np.int64)))
    read = sorted(train.sample(i).tolist() for i in range(20))
    assert read == sorted(np.concatenate([make_images(i) for i in range(5)]).tolist())
    gray = build(path, channels=1, vocab_size=16).sample(0)
    assert gray.shape == (1024,)
    assert gray.max() < 16


def test_a_missing_folder_is_named_with_the_files_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path)
    assert str(caught.value) == (
        f"training.dataset_path: there is no CIFAR-10 in {tmp_path}; put data_batch_1 to 5 "
        "(python) or the same files with .bin (binary) there, in cifar-10-batches-py or in "
        "cifar-10-batches-bin"
    )
    with pytest.raises(ConfigError, match=r"^training.dataset_path: cifar10 needs a local folder"):
        build("")
    write_python(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(ConfigError, match="put data_batch_1 to 5"):
        build(tmp_path)
    with pytest.raises(ConfigError, match=r"^validation.dataset_path: .* put test_batch "):
        build(tmp_path / "nowhere", "validation", path_key="validation.dataset_path")


@pytest.mark.parametrize("content", [b"", b"\x80\x02}q\x00.", b"not a pickle", b"\x80\x02K\x01."])
def test_a_damaged_python_batch_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_python(tmp_path)
    (folder / "data_batch_2").write_bytes(content)
    with pytest.raises(ConfigError, match=r"data_batch_2 is not a CIFAR-10 batch .*download it"):
        build(tmp_path)


def test_batches_of_another_shape_or_length_are_refused(tmp_path: Path) -> None:
    folder = write_python(tmp_path)
    floats = {b"data": np.zeros((2, 3072), dtype=np.float32)}
    (folder / "test_batch").write_bytes(pickle.dumps(floats, protocol=2))
    with pytest.raises(ConfigError, match=r"data is float32\[2, 3072\], not uint8\[N, 3072\]"):
        build(tmp_path, "validation")
    folder = write_binary(tmp_path)
    (folder / "test_batch.bin").write_bytes(b"\0" * 3072)
    with pytest.raises(ConfigError, match="not a whole number of 3073-byte records"):
        build(folder, "validation")


class Malicious:
    """When unpickled by pickle.load, creates the file at its path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    folder = write_python(tmp_path)
    mark = tmp_path / "it ran"
    content = pickle.dumps({b"data": Malicious(mark)}, protocol=protocol)
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(ConfigError, match=r"it uses (io|_io|__builtin__|builtins).open, which"):
        build(tmp_path)
    assert not mark.exists()
    # pickle.load does run the same content, so this test can detect an unsafe reader.
    pickle.loads(content)[b"data"].close()
    assert mark.exists()


class Naming:
    """Pickles as a call of the global with the given name."""

    def __init__(self, module: str, name: str) -> None:
        self.text = f"c{module}\n{name}\n"

    def stream(self) -> io.BytesIO:
        return io.BytesIO(self.text.encode() + b"(S'1'\ntR.")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
        ("numpy", "load"),
        ("numpy", "fromfile"),
        ("numpy.core.multiarray", "fromfile"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy", "ndarray.tofile"),
        ("_codecs", "lookup"),
        ("titanlite.data.images.cifar10", "pickle"),
    ],
)
def test_no_other_name_is_admitted(module: str, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="not plain data"):
        load_plain_pickle(Naming(module, name).stream())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_content_comes_back_as_it_was(protocol: int) -> None:
    arrays = [
        np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ("u1", "<i4", ">i8", "<f4", ">f8", "?")
    ]
    content = {"a": [1, 2.5, None, True, "text"], "arrays": arrays, "t": (arrays[0].T,)}
    back = load_plain_pickle(io.BytesIO(pickle.dumps(content, protocol=protocol)))
    assert back["a"] == content["a"]
    for was, now in zip([*arrays, arrays[0].T], [*back["arrays"], *back["t"]], strict=True):
        assert now.dtype == was.dtype
        assert np.array_equal(now, was)


def test_arrays_of_objects_are_refused() -> None:
    content = pickle.dumps(np.array([{"a": 1}], dtype=object), protocol=2)
    with pytest.raises(pickle.UnpicklingError, match="does not hold numbers"):
        load_plain_pickle(io.BytesIO(content))


def test_a_batch_written_by_python_2_is_read() -> None:
    # Like the distributed files: str for bytes, numpy.core, and byte strings in the dtype.
    stream = (
        b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\n"
        b"q\x04K\x00\x85U\x01b\x87Rq\x05(K\x01K\x01K\x03\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01"
        b"\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x03\x07\xff\x00tbs."
    )
    assert load_plain_pickle(io.BytesIO(stream))[b"data"].tolist() == [[7, 255, 0]]

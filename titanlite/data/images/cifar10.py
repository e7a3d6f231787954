"""CIFAR-10 from a local folder with the original python or binary batches.

The python batches are pickles, which can run any code when they are loaded. The reader here
prevents this: it accepts only the names needed for an array's bytes and shape.
Source of the formats: A. Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html
"""

import _codecs
import pickle
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titanlite.data.images.pixels import pixels_to_tokens
from titanlite.data.stored import StoredSequences
from titanlite.errors import ConfigError

LEVELS = 256
HEIGHT = WIDTH = 32
_IMAGE_BYTES = 3 * HEIGHT * WIDTH
_TRAIN_NAMES = tuple(f"data_batch_{i}" for i in range(1, 6))
_VALIDATION_NAMES = ("test_batch",)
_FORMATS = (("cifar-10-batches-py", ""), ("cifar-10-batches-bin", ".bin"))


def build_cifar10(
    split: str,
    *,
    path: str,
    seed: int,
    channels: int,
    vocab_size: int,
    path_key: str = "training.dataset_path",
    **_: Any,
) -> StoredSequences:
    """CIFAR-10 as tokens: the five training batches, or the test batch for validation.

    `path` is the folder of the batches or its parent. Raises ConfigError, which names `path_key`
    and the files, if they are missing, damaged or not plain arrays.
    """
    planes = np.concatenate(
        [_read_batch(file, path_key) for file in _find_batches(path, split, path_key)]
    )
    pixels = np.moveaxis(planes.reshape(-1, 3, HEIGHT, WIDTH), 1, -1)
    tokens = pixels_to_tokens(pixels, levels=LEVELS, channels=channels, vocab_size=vocab_size)
    return StoredSequences(tokens, shuffle_seed=seed if split == "train" else None)


def _find_batches(path: str, split: str, path_key: str) -> list[Path]:
    names = _TRAIN_NAMES if split == "train" else _VALIDATION_NAMES
    if not path:
        raise ConfigError(
            f"{path_key}: cifar10 needs a local folder; give the folder that contains "
            f"{_FORMATS[0][0]} or {_FORMATS[1][0]}"
        )
    root = Path(path).expanduser()
    for folder_name, suffix in _FORMATS:
        for folder in (root, root / folder_name):
            files = [folder / (name + suffix) for name in names]
            if all(file.is_file() for file in files):
                return files
    wanted = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].rsplit('_', 1)[-1]}"
    raise ConfigError(
        f"{path_key}: there is no CIFAR-10 in {root}; put {wanted} (python) or the same files "
        f"with .bin (binary) there, in {_FORMATS[0][0]} or in {_FORMATS[1][0]}"
    )


def _read_batch(file: Path, path_key: str) -> np.ndarray:
    """The images of one file, [N, 3072] uint8, each planar: red, green, blue."""
    if file.suffix == ".bin":
        records = np.fromfile(file, dtype=np.uint8)
        if len(records) == 0 or len(records) % (1 + _IMAGE_BYTES):
            raise ConfigError(
                f"{path_key}: {file} is not a whole number of {1 + _IMAGE_BYTES}-byte records; "
                "download it again"
            )
        return records.reshape(-1, 1 + _IMAGE_BYTES)[:, 1:]
    try:
        with file.open("rb") as stream:
            batch = load_plain_pickle(stream)
        data = batch[b"data"] if b"data" in batch else batch["data"]
        if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _IMAGE_BYTES:
            raise ValueError(f"data is {data.dtype}{list(data.shape)}, not uint8[N, 3072]")
    # A damaged pickle can raise almost any exception; for the user the cause is the same.
    except Exception as error:
        raise ConfigError(
            f"{path_key}: {file} is not a CIFAR-10 batch ({error}); download it again"
        ) from error
    return data


def load_plain_pickle(stream: BinaryIO) -> Any:
    """Read a pickle of numbers, strings, lists, dicts and NumPy arrays without running any code.

    NumPy's own unpickling code is not used either: arrays are rebuilt from their shape, dtype name
    and bytes. Raises pickle.UnpicklingError for any other content.
    """
    return _rebuild_arrays(_PlainUnpickler(stream, encoding="bytes").load())


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        for private in (".core.multiarray", "._core.multiarray", ".core.numeric", "._core.numeric"):
            module = module.removesuffix(private)
        if (module, name) == ("_codecs", "encode"):
            # Python 3 writes bytes this way at protocol 2.
            return _codecs.encode
        allowed = {
            ("numpy", "_reconstruct"): _PickledArray,
            ("numpy", "_frombuffer"): _PickledBuffer,
            ("numpy", "ndarray"): None,
            ("numpy", "dtype"): _PickledDtype,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not plain data")
        return allowed[module, name]


class _PickledDtype:
    def __init__(self, code: str | bytes, *_flags: object) -> None:
        self.code = code.decode() if isinstance(code, bytes) else code
        self.byte_order = "|"

    def __setstate__(self, state: tuple) -> None:
        self.byte_order = state[1].decode() if isinstance(state[1], bytes) else state[1]


class _PickledArray:
    def __init__(self, *_subtype_shape_code: object) -> None:
        self.state: tuple = ()

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def rebuild(self) -> np.ndarray:
        _version, shape, dtype, is_fortran, raw = self.state
        numeric = np.dtype(dtype.byte_order + dtype.code)
        if numeric.kind not in "biuf" or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it has an array that does not hold numbers")
        return np.frombuffer(raw, numeric).reshape(shape, order="F" if is_fortran else "C")


class _PickledBuffer(_PickledArray):
    """An array as written by protocol 5."""

    def __init__(self, raw: bytes, dtype: _PickledDtype, shape: tuple, order: str) -> None:
        if order not in ("C", "F"):
            raise pickle.UnpicklingError(f"it has an array with the unknown memory order {order!r}")
        self.state = (1, shape, dtype, order == "F", bytes(raw))


def _rebuild_arrays(value: Any) -> Any:
    if isinstance(value, _PickledArray):
        return value.rebuild()
    if isinstance(value, dict):
        return {key: _rebuild_arrays(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_rebuild_arrays(item) for item in value)
    return value

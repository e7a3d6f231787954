"""The weights of the whole model in .safetensors files, from any plan and to any plan.

One file has titanlite's own names. A Hugging Face folder (huggingface.py writes it) has the names
and layouts of the model's HFFormat. In loading, each rank reads only its shards of either.

A file is untrusted. It has only numbers and text; the configuration in its text is plain data, read
by tools/convert/stored.py.

Source of the format: https://huggingface.co/docs/safetensors
"""

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titanlite.checkpoint import state
from titanlite.checkpoint.group import CheckpointGroup
from titanlite.checkpoint.storage import Piece, Pieces
from titanlite.config import load_model_spec
from titanlite.errors import ConfigError
from titanlite.files import flush, open_regular, shown
from titanlite.job import Job
from titanlite.models.hf_format import HFFormat, HFTensor, format_of, weight_files
from titanlite.modules.lora import A, adapted_layer

# What peft puts before the names of the model of transformers.
PEFT_PREFIX = "base_model.model."
# Text of a file: the job's configuration, and whose names and layouts its tensors have.
CONFIG_KEY, LAYOUT_KEY, HF_LAYOUT = "titanlite.config", "titanlite.layout", "huggingface"


@dataclass(frozen=True)
class Names:
    """How the parameters of a model of these `sizes` are stored; by default as they are."""

    format: HFFormat | None = None
    sizes: Any = None

    def place(self, name: str, shape: Sequence[int]) -> HFTensor:
        """Where the parameter `name` of the whole `shape` is stored."""
        if self.format is None:
            return HFTensor(name)
        if (layer := adapted_layer(name)) is None:
            return self.format.tensor(name, shape, self.sizes)
        weight = self.format.tensor(f"{layer}.weight", shape, self.sizes)
        stored, is_a = weight.name.removesuffix(".weight"), name.endswith(A)
        # B has the rows of the weight.
        return HFTensor(
            f"{PEFT_PREFIX}{stored}.lora_{'A' if is_a else 'B'}.weight",
            head_dim=None if is_a else weight.head_dim,
        )

    @classmethod
    def of(cls, job: Job) -> "Names":
        """The names in the Hugging Face folders of a job's model; its own if it has no format."""
        return cls(format_of(load_model_spec(job.config)), job.resolved.model)


def write_file(path: Path, tensors: Mapping[str, Tensor], text: Mapping[str, str]) -> None:
    """Write tensors and text, and flush the file to the disk."""
    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **text})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only its owner read it
    flush(path)


def load_safetensors(
    job: Job,
    path: Path,
    ranks: CheckpointGroup,
    files: Iterable[Path] | None = None,
    *,
    only_adapters: bool = False,
) -> None:
    """Load each rank's shards from a .safetensors file, or a folder of them.

    Every rank must call this. `files` are the files of the folder, if it is known which are valid.
    It may hold no adapter of LoRA: these keep their initial values. With `only_adapters`, it holds
    nothing else. Raises ConfigError for missing keys, unexpected keys, wrong shapes, and weights
    that are not floating point.
    """
    own = Names.of(job)
    pieces = {name.partition(".")[2]: piece for name, piece in state.weight_pieces(job).items()}
    if only_adapters:
        pieces = {name: piece for name, piece in pieces.items() if adapted_layer(name)}
    with contextlib.ExitStack() as stack:
        stored = ranks.all_do(lambda: stack.enter_context(opened_weights(path, own, files)))
        found = stored.names_of({n: p for n, p in pieces.items() if adapted_layer(n)}, {})
        if not any(ranks.gathered(bool(found & stored.tensors.keys()))):
            pieces = {name: piece for name, piece in pieces.items() if not adapted_layer(name)}
        # Under a pipeline, each rank has only some of the names.
        wanted = set().union(*ranks.gathered(stored.names_of(pieces, job.tied)))
        ranks.all_do(lambda: stored.refuse_unexpected(wanted))
        ranks.all_do(lambda: stored.fill(pieces, job.parameters))


@dataclass
class StoredWeights:
    """The open .safetensors files of one model."""

    path: Path
    tensors: dict[str, tuple[Path, Any]]
    """Stored name -> its file, and the open file."""
    names: Names
    """Where each of the model's parameters is stored."""

    def names_of(self, pieces: Pieces, tied: Mapping[str, str]) -> set[str]:
        """The stored names of `pieces`, and of the further names of tied weights among them."""
        shapes = {name: piece.shape for name, piece in pieces.items()}
        shapes |= {name: shapes[first] for name, first in tied.items() if first in shapes}
        return {
            stored
            for name, shape in shapes.items()
            for stored in self._place(name, shape).names(shape)
        }

    def refuse_unexpected(self, wanted: set[str]) -> None:
        """Raises ConfigError for stored tensors that the model does not have."""
        format = self.names.format
        more = sorted(self.tensors.keys() - wanted)
        if more := [name for name in more if format is None or not format.is_ignored(name)]:
            file, _ = self.tensors[more[0]]
            raise ConfigError(
                f"checkpoint: {file} has unexpected keys: {_list(more)}; give the [model] it "
                "belongs to"
            )

    def dtype_of(self, name: str, shape: Sequence[int]) -> torch.dtype | None:
        """The stored dtype of a parameter; None if it is not stored."""
        stored_as = self._place(name, shape).names(shape)[0]
        if stored_as not in self.tensors:
            return None
        file, stored = self.tensors[stored_as]
        with explaining(file):
            source = stored.get_slice(stored_as)
            # An empty slice has the dtype too, and reads nothing.
            return (source[:0] if source.get_shape() else stored.get_tensor(stored_as)).dtype

    def fill(self, pieces: Pieces, parameters: Container[str]) -> None:
        """Fill pieces from where they are stored; raises ConfigError.

        Those that are not `parameters` are buffers, which may be missing.
        """
        places = {name: self._place(name, piece.shape) for name, piece in pieces.items()}
        missing = {
            name: lacking
            for name, place in places.items()
            if (lacking := set(place.names(pieces[name].shape)) - self.tensors.keys())
        }
        if names := sorted(set().union(*(missing[n] for n in missing if n in parameters))):
            raise ConfigError(
                f"checkpoint: {self.path} has missing keys: {_list(names)}; give the weights of "
                "this model"
            )
        for name in places.keys() - missing.keys():
            for place, piece in _each(places[name], pieces[name]):
                with explaining(self.tensors[place.name][0]):
                    self._read(place, piece)

    def _place(self, name: str, shape: Sequence[int]) -> HFTensor:
        """Where a parameter is stored here, where names may lack the format's prefix."""
        place, format = self.names.place(name, shape), self.names.format
        if format is None or not format.prefix or place.names(shape)[0] in self.tensors:
            return place
        short = replace(place, name=place.name.removeprefix(format.prefix))
        return short if short.names(shape)[0] in self.tensors else place

    def _read(self, place: HFTensor, piece: Piece) -> None:
        name = place.name
        file, stored = self.tensors[name]
        source = stored.get_slice(name)
        wanted = place.shape(piece.shape)
        if tuple(source.get_shape()) != wanted:
            raise ConfigError(
                f"checkpoint: {file}: {shown(name)} has shape {source.get_shape()}, and "
                f"{list(wanted)} in the model; give the [model] it belongs to"
            )
        if not piece.local.numel():
            return
        # safetensors cannot slice a scalar.
        found = read_shard(source, place, piece) if wanted else stored.get_tensor(name)
        if found.is_floating_point() != piece.local.is_floating_point():
            raise ConfigError(
                f"checkpoint: {file}: {shown(name)} is {_dtype(found)}, and "
                f"{_dtype(piece.local)} in the model; give floating-point weights"
            )
        piece.local.copy_(found)


@contextlib.contextmanager
def opened_weights(
    path: Path, names: Names, files: Iterable[Path] | None = None
) -> Iterator[StoredWeights]:
    """Open a .safetensors file, or those of a folder, which may have titanlite's own names.

    `names` are those in a Hugging Face folder. Raises ConfigError.
    """
    with contextlib.ExitStack() as stack:
        tensors: dict[str, tuple[Path, Any]] = {}
        layouts = set()
        for file in files or files_of(path):
            opened = stack.enter_context(opened_file(file))
            text = opened.metadata() or {}
            layouts.add(text.get(LAYOUT_KEY, "" if CONFIG_KEY in text else HF_LAYOUT))
            tensors |= dict.fromkeys(opened.keys(), (file, opened))
        yield StoredWeights(path, tensors, names if layouts == {HF_LAYOUT} else Names())


def _each(place: HFTensor, piece: Piece) -> Iterator[tuple[HFTensor, Piece]]:
    """The stored tensors that hold a piece, each with its part of the piece."""
    if not place.is_split:
        yield place, piece
        return
    inner = replace(place, is_split=False)
    for number, local in enumerate(piece.local, piece.offsets[0]):
        part = Piece(local, piece.shape[1:], piece.offsets[1:])
        yield replace(inner, name=place.name.format(number)), part


def read_shard(source: Any, place: HFTensor, piece: Piece) -> Tensor:
    """The shard of a parameter in `source`, which is sliced like a tensor of the stored shape.

    Reads no more than the shard, but whole heads where `place` reorders the rows of heads, and all
    of a flat dimension.
    """
    starts, sizes = list(piece.offsets), list(piece.local.shape)
    where = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    if place.is_flat:
        where[-2:] = [slice(0, piece.shape[-2] * piece.shape[-1])]
    if place.head_dim is not None:
        first, last = starts[0] // place.head_dim, -(-where[0].stop // place.head_dim)
        where[0] = slice(first * place.head_dim, last * place.head_dim)
        starts[0] -= where[0].start
    if place.rows is not None:
        where[0] = slice(where[0].start + place.rows[0], where[0].stop + place.rows[0])
    found: Tensor = source[tuple(reversed(where) if place.is_transposed else where)]
    if place.is_transposed:
        found = found.permute(*reversed(range(found.ndim)))
    if place.head_dim is not None:
        by_half = found.unflatten(0, (-1, 2, place.head_dim // 2))
        found = by_half.transpose(1, 2).flatten(0, 2).narrow(0, starts[0], sizes[0])
    if place.is_flat:
        found = found.unflatten(-1, piece.shape[-2:])
        for dim in (-2, -1):
            found = found.narrow(dim, starts[dim], sizes[dim])
    return found


def to_stored(tensor: Tensor, place: HFTensor) -> Tensor:
    """A whole parameter as it is stored, or its part of the stored tensor if that joins several.

    If `place` splits the parameter, `tensor` is one index of its dimension 0.
    """
    if place.is_flat:
        tensor = tensor.flatten(-2)
    if place.head_dim is not None:
        by_pair = tensor.unflatten(0, (-1, place.head_dim // 2, 2))
        tensor = by_pair.transpose(1, 2).flatten(0, 2)
    if place.is_transposed:
        tensor = tensor.permute(*reversed(range(tensor.ndim)))
    return tensor.contiguous()


def _list(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(shown, names[:3])) + more


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def files_of(path: Path) -> list[Path]:
    """The file `path`, or the .safetensors files in it; raises ConfigError if there is none."""
    files = [path] if path.is_file() else weight_files(path)
    if not files:
        raise ConfigError(f"checkpoint: {path} is neither a .safetensors file nor a folder of them")
    return files


@contextlib.contextmanager
def opened_file(file: Path) -> Iterator[Any]:
    """Open a .safetensors file; raises ConfigError if it, or a tensor of it, cannot be read."""
    with explaining(file):
        # A pipe would block safe_open. Links are followed: Hugging Face's folders consist of links.
        open_regular(file).close()
        with safe_open(file, framework="pt") as stored:
            yield stored


@contextlib.contextmanager
def explaining(file: Path) -> Iterator[None]:
    """Turn an error in reading `file` into one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"checkpoint: {file}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigError(
            f"checkpoint: {file} cannot be read ({shown(str(error), 200)})"
        ) from error

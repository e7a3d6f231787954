"""Hugging Face folders: config.json, .safetensors files and their index; torch-free.

    HFFormat    how a model's sizes and parameters are stored there; a ModelSpec's `hf`
    HFTensor    where one parameter is stored, and in which layout
    format_of   the format of a registered model
    read_json, weight_files, sizes_problems    read a folder, which may come from anybody

A folder may be one that transformers wrote, or another program, so it is read as data: JSON, and
files that have plain names.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from titanlite.errors import ConfigError
from titanlite.files import read_bytes, shown
from titanlite.models.spec import ModelSpec

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
# Files of a folder that do not depend on the weights.
COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
# Keys of config.json that do not depend on the sizes either.
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What code that expects valid values raises for others.
INVALID = (ValueError, TypeError, ZeroDivisionError)
MOST_JSON_BYTES = 128 * 2**20


@dataclass(frozen=True)
class HFTensor:
    """Where and how a parameter is stored. By default the tensor `name` is the parameter itself.

    `rows` is (first row, number of rows in all) if `name` joins several parameters by their rows
    (dimension 0). With `head_dim`, the parameter's rows are the output features of heads of that
    size, whose rotary pairs are rows 2i and 2i + 1 here, and rows i and head_dim / 2 + i there.
    `is_transposed`: stored as [in, out], as in GPT-2's Conv1D. `is_flat`: the last two dimensions
    are stored as one. `is_split`: each index of dimension 0 is stored as a tensor of its own, whose
    name has the index in place of `{}`.
    """

    name: str
    rows: tuple[int, int] | None = None
    head_dim: int | None = None
    is_transposed: bool = False
    is_flat: bool = False
    is_split: bool = False

    def names(self, own: Sequence[int]) -> tuple[str, ...]:
        """The stored tensors of a parameter of the shape `own`."""
        return tuple(map(self.name.format, range(own[0]))) if self.is_split else (self.name,)

    def shape(self, own: Sequence[int]) -> tuple[int, ...]:
        """The shape of one stored tensor, for a parameter of the shape `own`."""
        shape = list(own[1:] if self.is_split else own)
        if self.is_flat:
            shape[-2:] = [shape[-2] * shape[-1]]
        if self.rows is not None:
            shape[0] = self.rows[1]
        return tuple(reversed(shape) if self.is_transposed else shape)


@dataclass(frozen=True)
class HFFormat:
    """How the folders of one model are written and read.

    tensor      (parameter's name, its shape, the model's sizes) -> where it is stored
    config      the model's sizes -> config.json, with `architectures` and `model_type`
    sizes       config.json -> the keys of [model]; raises ValueError with what the model cannot do
    compared    the attributes of the sizes that must agree; by default those that `sizes` gives
    differing   (sizes, config.json) -> lines about what differs, in place of `compared`
    prefix      what the names of some folders lack, such as "transformer."
    ignored     patterns of tensors that hold no weight, such as tables of positions
    unfit       sizes -> (key, "what the folder cannot hold; what to do")

    The model's sizes are its configuration dataclass.
    """

    tensor: Callable[[str, Sequence[int], Any], HFTensor]
    config: Callable[[Any], dict[str, Any]]
    sizes: Callable[[Mapping[str, Any]], dict[str, Any]]
    compared: tuple[str, ...] = ()
    differing: Callable[[Any, Mapping[str, Any]], list[str]] | None = None
    prefix: str = ""
    ignored: tuple[str, ...] = ()
    unfit: Callable[[Any], Iterable[tuple[str, str]]] | None = None

    def require_fit(self, sizes: Any) -> None:
        """Raises ConfigError unless a folder can hold the model of these `sizes`."""
        if self.unfit is not None and (found := list(self.unfit(sizes))):
            raise ConfigError(*(f"{key}: {message}" for key, message in found))

    def require_alone(self, weights: Mapping[str, Sequence[int]], sizes: Any) -> None:
        """Raises ConfigError if a folder joins one of these weights with others: shape by name."""
        for name, shape in weights.items():
            if self.tensor(name, shape, sizes).rows is not None:
                layer = name.removesuffix(".weight")
                raise ConfigError(
                    f"lora.save_merged: peft's format has no adapter of {layer} alone, which "
                    "Hugging Face's folder joins with others; set it to true, or name other layers "
                    "in lora.target_modules"
                )

    def is_ignored(self, name: str) -> bool:
        """Whether the stored tensor `name` holds no weight."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)

    def differences(self, sizes: Any, found: Mapping[str, Any]) -> list[str]:
        """What config.json says otherwise than the model's `sizes`, one line each."""
        if self.differing is not None:
            return self.differing(sizes, found)
        try:
            given = self.sizes(found)
            wanted = replace(sizes, **given)
            pairs = {n: (getattr(wanted, n), getattr(sizes, n)) for n in self.compared or given}
        except INVALID as error:
            return [str(error)]
        return [
            f"has {name} {_shown(there)}, and the [model] {_shown(here)}"
            for name, (there, here) in pairs.items()
            if there != here
        ]


def format_of(spec: ModelSpec) -> HFFormat | None:
    """The format of a registered model; None if it has none.

    Raises ConfigError if it cannot be imported or is not an HFFormat.
    """
    found = spec.load_part("hf")
    if found is not None and not isinstance(found, HFFormat):
        raise ConfigError(
            f"model.name: `hf` of {spec.name} is a {type(found).__name__}; give an HFFormat"
        )
    return found


def is_hf_folder(path: Path) -> bool:
    """Whether `path` is a folder with config.json."""
    return (path / CONFIG).is_file()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that anybody may have written; raises ConfigError."""
    try:
        found = json.loads(read_bytes(path, most_bytes=MOST_JSON_BYTES))
    except OSError as error:
        raise ConfigError(f"checkpoint: {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"checkpoint: {path} is not a JSON object; download or save it again")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files of a folder: those of its index, or all.

    If the folder has config.json, model.safetensors, but no index, only that file. Raises
    ConfigError for an index that is not valid, or that names a missing file.
    """
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        names = set(index.values()) if isinstance(index, dict) else set()
        if not names or not all(
            isinstance(name, str) and name.endswith(".safetensors") and not {*name} & {"/", "\\"}
            for name in names
        ):
            raise ConfigError(
                f"checkpoint: {folder / INDEX} has no valid weight_map; download or save it again"
            )
        if missing := sorted(name for name in names if not (folder / name).is_file()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(
                f"checkpoint: {folder} lacks {shown(missing[0])}{more}, which {INDEX} names; "
                "download or save the folder again"
            )
        return [folder / name for name in sorted(names)]
    if is_hf_folder(folder) and (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    return sorted(folder.glob("*.safetensors"))


def sizes_problems(format: HFFormat, sizes: Any, folder: Path) -> Iterator[str]:
    """What the config.json of `folder` says otherwise than the model's `sizes`.

    Raises ConfigError if it cannot be read.
    """
    for line in format.differences(sizes, read_json(folder / CONFIG)):
        yield f"{folder / CONFIG} {line}; give the [model] that it describes"


def require(found: Mapping[str, Any], key: str, *legal: Any, default: Any = "nothing") -> None:
    """Raises ValueError unless config.json has one of the values `legal` for `key`.

    `default` is the value of a missing key.
    """
    if (value := found.get(key, default)) not in legal:
        raise ValueError(f"has {key} {_shown(value)}, and this model {_shown(legal[0])}")


def _shown(value: Any) -> str:
    return shown(value if isinstance(value, str) else repr(value))

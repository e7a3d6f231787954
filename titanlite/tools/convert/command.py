"""`titanlite convert`: a checkpoint to a .safetensors file or a Hugging Face folder, or back.

It runs in one process.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

import titanlite.models  # noqa: F401 (registers the models)
from titanlite.checkpoint.folder import STEP, CheckpointFolder, make_token
from titanlite.checkpoint.manifest import (
    MANIFEST,
    SAFETENSORS,
    BrokenCheckpointError,
    FileRecord,
    Manifest,
    check_files,
    describe_invalid,
)
from titanlite.config import JobConfig, load_model_spec, make_model_config
from titanlite.config.model import import_module
from titanlite.errors import ConfigError, TitanliteError, quote
from titanlite.models.hf_format import CONFIG, INVALID, format_of, is_hf_folder, read_json
from titanlite.observe.terminal import telling
from titanlite.parallelize.lora.spec import LoRA
from titanlite.registry import MODELS
from titanlite.tools.convert.stored import find_checkpoint, stored_sections
from titanlite.tools.options import CommandParser, say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from titanlite.checkpoint.storage import Pieces
    from titanlite.checkpoint.weights import Names, StoredWeights

IMPORT, PATH = "experimental.custom_import", "model.path"
DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16")


@telling("converting")
def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    parser = CommandParser(
        prog="titanlite convert",
        description="Convert the weights of a checkpoint to a Hugging Face folder or to one "
        ".safetensors file, or either of these to a checkpoint that holds only weights.",
    )
    add = parser.add_argument
    add("source", type=Path, help="step-N, a folder of them, .safetensors, or Hugging Face folder")
    add("--out", type=Path, metavar="PATH", help="file or folder to write")
    add("--dtype", choices=DTYPE_NAMES, help="dtype to write; default: unchanged")
    copied = "Hugging Face folder, whose tokenizer and generation settings are copied"
    add("--like", type=Path, metavar="FOLDER", help=copied)
    merge = (
        "add the adapters of LoRA to the weights; default: only the adapters, as peft reads them"
    )
    add("--merge", action="store_true", help=merge)
    check = "compare a Hugging Face folder with transformers: names, shapes, outputs of each module"
    add("--check", action="store_true", help=check)
    model = "the model that gets the weights of a Hugging Face folder; default: hf, its own code"
    add("--model", metavar="NAME", help=model)
    add(f"--{IMPORT}", metavar="MODULE", help="module that registers the model")
    add(f"--{PATH}", metavar="FOLDER", help="folder with config.json, if the model hf has one")
    asked = parser.parse_args(arguments)
    is_file = asked.source.suffix == ".safetensors"
    is_hf = is_hf_folder(asked.source) and not (asked.source / MANIFEST).exists()
    given = {key: getattr(asked, key) for key in (IMPORT, PATH)}
    if module := given[IMPORT]:
        import_module(module)
    if asked.out is None:
        if not (asked.check and is_hf_folder(asked.source)):
            raise ConfigError("--out: is not set; give it, or --check for a Hugging Face folder")
        return check_hf_folder(asked.source, asked.model)
    to_file = asked.out.suffix == ".safetensors"
    if (is_file or is_hf) and to_file:
        raise ConfigError(
            "--out: one of source and --out must be a .safetensors file, and the other a folder"
            if is_file
            else "--out: a Hugging Face folder is converted to a checkpoint; give a folder"
        )
    if asked.out.exists():
        raise ConfigError(f"--out: {asked.out} exists already; give another name")
    to_hf = not (is_file or is_hf or to_file)
    for option, value, fits in (
        ("--like", asked.like, to_hf),
        ("--merge", asked.merge or None, to_hf),
        ("--check", asked.check or None, to_hf),
        ("--model", asked.model, is_hf),
    ):
        if value is not None and not fits:
            raise ConfigError(f"{option}: has no effect on this conversion; remove it")
    if asked.like is not None and not is_hf_folder(asked.like):
        raise ConfigError(f"--like: {asked.like} has no config.json; give a Hugging Face folder")
    if is_hf:
        count = from_hf_folder(asked.source, asked.out, asked.model, asked.dtype)
    elif is_file:
        count = to_checkpoint(asked.source, asked.out, asked.dtype)
    elif to_file:
        count = to_safetensors(asked.source, asked.out, asked.dtype)
    else:
        like, merges = asked.like, asked.merge
        count = to_hf_folder(
            asked.source, asked.out, asked.dtype, like=like, given=given, merges=merges
        )
    say(f"{count:,} parameters: {asked.out}")
    return check_hf_folder(asked.out) if asked.check else 0


def to_safetensors(source: Path, out: Path, dtype: str | None = None) -> int:
    """Write the weights of a checkpoint to one file; returns the number of parameters."""
    from titanlite.checkpoint.weights import CONFIG_KEY, write_file

    tensors, manifest = _read_checkpoint(source, dtype)
    with _making(out) as unfinished:
        unfinished.touch(exist_ok=False)
        write_file(unfinished, tensors, {CONFIG_KEY: json.dumps(manifest.config)})
        unfinished.rename(out)
    return sum(tensor.numel() for tensor in tensors.values())


def to_hf_folder(
    source: Path,
    out: Path,
    dtype: str | None = None,
    *,
    like: Path | None = None,
    given: Mapping[str, str | None] | None = None,
    merges: bool = False,
) -> int:
    """Write the weights of a checkpoint to a Hugging Face folder; returns the number of parameters.

    `like` is a folder whose tokenizer and generation settings are copied. `given` has the keys that
    are not taken from a checkpoint (stored.py). Of a model with adapters, these are written alone,
    or with `merges` added to the weights.
    """
    from titanlite.checkpoint.huggingface import FolderWriter, peft_config
    from titanlite.checkpoint.weights import CONFIG_KEY
    from titanlite.modules.lora import adapted_layer, merged

    path, manifest = find_checkpoint(source)
    names = _names_of(manifest.config, path, given)
    if names.format is None:
        raise ConfigError(
            f"{path}: its model has no Hugging Face format, as llama3, gpt2 and hf have; "
            "give --out a .safetensors file, or register the model with `hf`"
        )
    names.format.require_fit(names.sizes)
    tensors, _ = _read_checkpoint(path, dtype, names)
    kinds = {tensors[name].dtype for name in manifest.shapes if name in tensors}
    if len(kinds) != 1:
        raise ConfigError(f"--dtype: {path} has weights of several dtypes; give one of them")
    shapes, section = manifest.shapes, _lora_of(manifest.config, path)
    adapters = {name: whole for name, whole in tensors.items() if adapted_layer(name)}
    more: dict[str, Any] = {"adapters": True}
    if adapters and not merges:
        base = manifest.config.get("checkpoint", {}).get("initial_load_path")
        config = peft_config(shapes, names, section, base)
        tensors = adapters
    else:
        scales = {layer: section.scale for layer in map(adapted_layer, adapters) if layer}
        tensors = dict(merged(tensors.items(), scales))
        buffers = {name: tensor for name, tensor in tensors.items() if name not in shapes}
        more = {"buffers": buffers, "text": {CONFIG_KEY: json.dumps(manifest.config)}}
        config = names.format.config(names.sizes)
    shapes = {name: shape for name, shape in shapes.items() if name in tensors}
    with _making(out) as unfinished:
        writer = FolderWriter(unfinished, shapes, names, kinds.pop(), **more)
        for name in shapes:
            writer.add(name, tensors[name])
        writer.finish(config, like)
        unfinished.rename(out)
    return sum(tensors[name].numel() for name in shapes)


def _lora_of(config: Mapping[str, Mapping[str, Any]], source: Path) -> LoRA:
    try:
        return LoRA.model_validate(config.get("lora", {}))
    except ValidationError as error:
        raise ConfigError(f"{source} has an invalid [lora]: {describe_invalid(error)}") from error


def to_checkpoint(source: Path, out: Path, dtype: str | None = None) -> int:
    """Write a .safetensors file as a checkpoint of weights; returns the number of elements."""
    tensors = read_tensors(source)
    if not tensors:
        raise ConfigError(f"{source} has no tensors; give another file")
    return _write_checkpoint(tensors, read_config(source) or {}, source, out, dtype, "one file")


def from_hf_folder(
    source: Path, out: Path, model: str | None = None, dtype: str | None = None
) -> int:
    """Write a Hugging Face folder as a checkpoint of weights; returns the number of elements.

    `model` is the registered model that gets the weights; its sizes are those of config.json.
    """
    from titanlite.checkpoint.weights import opened_weights
    from titanlite.modules.tied import find_tied

    written, names, plain = _folder_model(source, model)
    shapes = {name: parameter.shape for name, parameter in plain.named_parameters()}
    with opened_weights(source, names) as stored:
        pieces = _pieces_of(stored, shapes, plain)
        stored.refuse_unexpected(stored.names_of(pieces, find_tied(plain)))
        stored.fill(pieces, shapes)
    tensors = {name: piece.local for name, piece in pieces.items()}
    buffers = pieces.keys() - shapes.keys()
    return _write_checkpoint(tensors, written, source, out, dtype, "a Hugging Face folder", buffers)


def check_hf_folder(folder: Path, model: str | None = None) -> int:
    """Compare what titanlite and transformers make of a folder; 0 if they agree, else 1.

    `model` is as in from_hf_folder.
    """
    import torch

    from titanlite.checkpoint.storage import Piece
    from titanlite.checkpoint.weights import opened_weights
    from titanlite.models.build import initial_model
    from titanlite.modules.shards import buffers_of
    from titanlite.modules.tied import find_tied
    from titanlite.tools.convert.check import check_folder

    if not is_hf_folder(folder):
        raise ConfigError(f"--check: {folder} has no config.json, so no whole model; give --merge")
    written, names, _ = _folder_model(folder, model)
    plain = initial_model(MODELS[written["model"]["name"]], names.sizes, torch.float32, seed=0)
    parameters = dict(plain.named_parameters())
    tensors = {**parameters, **buffers_of([plain])}
    pieces = {name: Piece.whole(tensor.detach()) for name, tensor in tensors.items()}
    with opened_weights(folder, names) as stored:
        stored.refuse_unexpected(stored.names_of(pieces, find_tied(plain)))
        stored.fill(pieces, parameters)
        try:
            check_folder(folder, stored, names, plain)
        except ConfigError:
            raise
        except TitanliteError as error:
            say(f"DIFFERS: {error}")
            return 1
    return 0


def _folder_model(source: Path, model: str | None) -> tuple[dict[str, Any], Names, nn.Module]:
    """The configuration that a folder gives a model, its names, and the model on "meta"."""
    written = read_config(source)
    own = (written or {}).get("model", {}).get("name", "hf")
    if written is None or model is not None or own == "hf":
        written = {**(written or {}), "model": _model_of(source, model or own)}
    names = _names_of(written, source)
    return written, names, _plain_model(written, names)


def _model_of(folder: Path, model: str) -> dict[str, Any]:
    """The keys of [model] for the config.json of a folder; raises ConfigError."""
    if model not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ConfigError(
            f"--model: there is no model {quote(model)}; give one of {known}, "
            "or --experimental.custom_import, the module that registers it"
        )
    format = format_of(MODELS[model])
    if format is None:
        raise ConfigError(f"--model: {quote(model)} has no Hugging Face format; give another model")
    try:
        return {"name": model, **format.sizes(read_json(folder / CONFIG))}
    except INVALID as error:
        raise ConfigError(f"--model: {folder / CONFIG} {error}; give another --model") from error
    except ImportError as error:
        raise ConfigError(
            f'--model: {quote(model)} needs transformers; pip install "titanlite[hf]", or give '
            "another model"
        ) from error


def _names_of(
    config: Mapping[str, Mapping[str, Any]],
    source: Path,
    given: Mapping[str, str | None] | None = None,
) -> Names:
    """How the model of a stored configuration is stored in a Hugging Face folder."""
    from titanlite.checkpoint.weights import Names

    if not config.get("model"):
        raise ConfigError(f"{source} has no configuration of its model; give a checkpoint of a run")
    # Only the model is needed, not its data.
    used = {name: keys for name, keys in config.items() if name in ("model", "experimental")}
    sections = stored_sections(used, source, given or {})
    try:
        job = JobConfig.model_validate(sections)
    except ValidationError as error:
        raise ConfigError(
            f"{source} has an invalid configuration: {describe_invalid(error)}"
        ) from error
    return Names(format_of(load_model_spec(job)), make_model_config(job))


def _read_checkpoint(
    source: Path, dtype: str | None, names: Names | None = None
) -> tuple[dict[str, Tensor], Manifest]:
    """The weights of a checkpoint, whole, with titanlite's names; raises ConfigError."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException

    from titanlite.checkpoint import storage
    from titanlite.checkpoint.state import MODEL, averaged
    from titanlite.checkpoint.weights import opened_weights
    from titanlite.modules.lora import adapted_layer

    path, manifest = find_checkpoint(source)
    try:
        check_files(path, manifest.files, manifest.files)
        if manifest.stored_as == "safetensors":
            tensors = read_tensors(path / SAFETENSORS)
        elif manifest.stored_as == "huggingface":
            names = names or _names_of(manifest.config, path)
            files = [path / name for name in manifest.weight_files]
            with opened_weights(path, names, files) as opened:
                plain = _plain_model(manifest.config, names)
                # A run with adapters has merged them.
                shapes = {n: s for n, s in manifest.shapes.items() if not adapted_layer(n)}
                pieces = _pieces_of(opened, shapes, plain)
                opened.fill(pieces, shapes)
            tensors = {name: piece.local for name, piece in pieces.items()}
        else:
            stored = storage.stored_tensors(path, manifest.files)
            tensors = {
                name.partition(".")[2]: torch.zeros(shape, dtype=kind)
                for name, (shape, kind) in stored.items()
                if name.startswith(f"{MODEL}.")
            }
            pieces = {f"{MODEL}.{name}": storage.Piece.whole(t) for name, t in tensors.items()}
            storage.load(averaged(pieces, stored), path, None)
    except (BrokenCheckpointError, CheckpointException) as error:
        why = storage.cause_line(_first_cause(error))
        raise ConfigError(f"{path} cannot be used: {why}; give another checkpoint") from error
    if dtype:
        kind = getattr(torch, dtype)
        tensors = {n: t.to(kind) if n in manifest.shapes else t for n, t in tensors.items()}
    return tensors, manifest


def _plain_model(config: Mapping[str, Mapping[str, Any]], names: Names) -> nn.Module:
    """The model of a stored configuration, on the meta device."""
    import torch

    from titanlite.models.build import build_model

    with torch.device("meta"):
        return build_model(MODELS[config["model"]["name"]], names.sizes, torch.float32)


def _pieces_of(
    stored: StoredWeights, shapes: Mapping[str, Sequence[int]], plain: nn.Module
) -> Pieces:
    """Whole tensors to fill: parameters of `shapes` in the stored dtype, and zero buffers."""
    import torch

    from titanlite.checkpoint.storage import Piece
    from titanlite.modules.shards import buffers_of

    kinds = {name: stored.dtype_of(name, shape) or torch.float32 for name, shape in shapes.items()}
    tensors = {name: torch.empty(tuple(shape), dtype=kinds[name]) for name, shape in shapes.items()}
    for name, buffer in buffers_of([plain]).items():
        tensors[name] = torch.zeros_like(buffer, device="cpu")
    return {name: Piece.whole(tensor) for name, tensor in tensors.items()}


def _write_checkpoint(
    tensors: dict[str, Tensor],
    config: dict[str, dict[str, Any]],
    source: Path,
    out: Path,
    dtype: str | None,
    plan: str,
    buffers: Container[str] = (),
) -> int:
    """Write a checkpoint of weights; `buffers` keep their dtype. Returns the number of elements."""
    import torch

    from titanlite.checkpoint import storage
    from titanlite.checkpoint.state import MODEL

    parameters = {name: tensor for name, tensor in tensors.items() if name not in buffers}
    if dtype:
        parameters = {name: t.to(getattr(torch, dtype)) for name, t in parameters.items()}
    tensors = tensors | parameters
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in parameters.values()}
    # A name step-N makes it the checkpoint of step N, and the newest one of its folder.
    folder, named = CheckpointFolder(out.parent), STEP.fullmatch(out.name)

    def seal(files: Mapping[str, FileRecord]) -> None:
        try:
            manifest = Manifest(
                step=int(named[1]) if named else 0,
                serial=folder.next_serial() if named else 1,
                holds="weights",
                stored_as="dcp",
                shapes={name: list(tensor.shape) for name, tensor in parameters.items()},
                dtype=", ".join(sorted(kinds)),
                plan=plan,
                num_ranks=1,
                config=config,
                titanlite="",
                torch=torch.__version__,
                files=dict(files),
            )
        except ValidationError as error:
            why = describe_invalid(error)
            raise ConfigError(f"{source} cannot be converted to a checkpoint: {why}") from error
        folder.commit(unfinished, out, manifest, make_token())

    pieces = {f"{MODEL}.{name}": storage.Piece.whole(tensor) for name, tensor in tensors.items()}
    with _making(out) as unfinished:
        unfinished.mkdir()
        storage.save(pieces, unfinished, None, seal)
    return sum(tensor.numel() for tensor in parameters.values())


def _first_cause(error: BaseException) -> BaseException:
    """The error of the first failed rank if DCP raised `error`; otherwise `error` itself."""
    from torch.distributed.checkpoint.api import CheckpointException

    from titanlite.checkpoint.storage import first_failure

    return first_failure(error)[1] if isinstance(error, CheckpointException) else error


@contextlib.contextmanager
def _making(out: Path) -> Iterator[Path]:
    """A name beside `out`, to write to and then rename; raises ConfigError if writing fails."""
    from torch.distributed.checkpoint.api import CheckpointException

    from titanlite.checkpoint.storage import cause_line

    unfinished = out.with_name(f"{out.name}.new-{make_token()}")
    try:
        if not out.parent.exists():
            out.parent.mkdir(parents=True)
        yield unfinished
    except (OSError, CheckpointException) as error:
        cause = _first_cause(error)
        if isinstance(cause, ConfigError):
            raise cause from error
        raise ConfigError(f"--out: writing {out} failed: {cause_line(cause)}") from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a .safetensors file, or a folder of them; raises ConfigError."""
    from titanlite.checkpoint.weights import Names, explaining, opened_weights

    with opened_weights(path, Names()) as opened:
        tensors = {}
        for name, (file, stored) in opened.tensors.items():
            with explaining(file):
                tensors[name] = stored.get_tensor(name)
    return tensors


def read_config(path: Path) -> dict[str, Any] | None:
    """The job's configuration in a .safetensors file; None if titanlite did not write the file.

    Raises ConfigError if the configuration is not valid.
    """
    from titanlite.checkpoint.weights import CONFIG_KEY, files_of, opened_file

    file = files_of(path)[0]
    with opened_file(file) as stored:
        text = (stored.metadata() or {}).get(CONFIG_KEY)
    if not text:
        return None
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or not all(isinstance(keys, dict) for keys in config.values()):
        raise ConfigError(f"checkpoint: {file} has a {CONFIG_KEY} that is not a configuration")
    return config

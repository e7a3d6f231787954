"""Write a Hugging Face folder, which from_pretrained of transformers reads.

FolderWriter       takes whole parameters one by one, and writes config.json and shards of weights
save_model_files   the weights of a job, whether its model has a Hugging Face format or not
companions         tokenizer and generation settings, to be copied from another folder
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.group import CheckpointGroup
from titanlite.checkpoint.manifest import ADAPTERS, PEFT_CONFIG, record_of
from titanlite.checkpoint.storage import Seal
from titanlite.checkpoint.weights import (
    CONFIG_KEY,
    HF_LAYOUT,
    LAYOUT_KEY,
    Names,
    to_stored,
    write_file,
)
from titanlite.files import flush
from titanlite.job import Job
from titanlite.models.hf_format import (
    COMPANIONS,
    CONFIG,
    INDEX,
    TOKEN_KEYS,
    WEIGHTS,
    HFTensor,
    is_hf_folder,
    read_json,
)
from titanlite.modules.lora import adapted_layer
from titanlite.parallelize.lora.spec import LoRA

# As transformers 4: the size above which the weights are written as several files.
SHARD_BYTES = 5_000_000_000


class FolderWriter:
    """Writes a model's parameters to a new Hugging Face folder, in `dtype`.

    If `names` has no format, the parameters are written to one file under their own names. With
    `adapters`, the parameters are those of LoRA alone, and the folder is one that peft reads.
    `shapes` has the whole shape of every parameter, in the order in which `add` gets them, and
    `buffers` are written with them. A tensor that joins several parameters is written when all of
    them have come. At most one file of the folder is in memory at a time.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, Sequence[int]],
        names: Names,
        dtype: torch.dtype,
        *,
        buffers: Mapping[str, Tensor] | None = None,
        text: Mapping[str, str] | None = None,
        shard_bytes: int = SHARD_BYTES,
        adapters: bool = False,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._text, self._adapters = dict(text or {}), adapters
        if names.format is None or adapters:
            shard_bytes = sys.maxsize
        if names.format is not None:
            self._text[LAYOUT_KEY] = HF_LAYOUT
        self._places = {name: names.place(name, shape) for name, shape in shapes.items()}
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._num_parts: dict[str, int] = {}
        bytes_of: dict[str, int] = {}
        for name, shape in shapes.items():
            stored_as = self._places[name].names(shape)
            size = torch.Size(shape).numel() * dtype.itemsize // len(stored_as)
            for stored in stored_as:
                bytes_of[stored] = bytes_of.get(stored, 0) + size
                self._num_parts[stored] = self._num_parts.get(stored, 0) + 1
        self._shards: list[dict[str, Tensor | None]] = [{}]
        self.num_bytes = in_shard = 0
        for stored, size in bytes_of.items():
            if in_shard and in_shard + size > shard_bytes:
                self._shards.append({})
                in_shard = 0
            self._shards[-1][stored] = None
            in_shard += size
            self.num_bytes += size
        for name, buffer in (buffers or {}).items():
            stored = names.place(name, buffer.shape).name
            self._shards[-1][stored] = buffer.detach().to("cpu", copy=True).contiguous()
            self.num_bytes += buffer.numel() * buffer.element_size()
        self._shard_of = {name: n for n, shard in enumerate(self._shards) for name in shard}
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, name: str, whole: Tensor) -> None:
        """Take a whole parameter; it is copied to the CPU."""
        place = self._places[name]
        each = whole.detach() if place.is_split else [whole.detach()]
        for stored, tensor in zip(place.names(whole.shape), each, strict=True):
            self._add(stored, place, tensor.to("cpu", self._dtype, copy=True))

    def _add(self, stored: str, place: HFTensor, tensor: Tensor) -> None:
        parts = self._parts.setdefault(stored, {})
        parts[place.rows[0] if place.rows else 0] = to_stored(tensor, place)
        if len(parts) < self._num_parts[stored]:
            return
        in_order = [parts[row] for row in sorted(parts)]
        del self._parts[stored]
        number = self._shard_of[stored]
        shard = self._shards[number]
        dim = -1 if place.is_transposed else 0
        shard[stored] = in_order[0] if len(in_order) == 1 else torch.cat(in_order, dim=dim)
        if all(tensor is not None for tensor in shard.values()):
            file = self._folder / self._file_name(number)
            write_file(file, {n: t for n, t in shard.items() if t is not None}, self._text)
            shard.clear()

    def finish(self, config: Mapping[str, Any] | None, like: Path | None = None) -> list[Path]:
        """Write config.json and the index, and copy tokenizer files from `like`; all files.

        Without `config` there is no config.json.
        """
        assert not any(self._shards), "not every parameter was given"
        token_keys = {}
        if like is not None and is_hf_folder(like):
            found = read_json(like / CONFIG)
            token_keys = {key: found[key] for key in TOKEN_KEYS if key in found}
        dtype = str(self._dtype).removeprefix("torch.")
        if config is not None and self._adapters:
            self._write_json(PEFT_CONFIG, config)
        elif config is not None:
            self._write_json(CONFIG, {**config, **token_keys, "dtype": dtype})
        if len(self._shards) > 1:
            where = {name: self._file_name(n) for name, n in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": where}
            self._write_json(INDEX, index)
        for file in companions(like):
            self._write(file.name, file.read_bytes())
        return sorted(self._folder.iterdir())

    def _file_name(self, number: int) -> str:
        if self._adapters:
            return ADAPTERS
        count = len(self._shards)
        return WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(content, indent=2) + "\n").encode())

    def _write(self, name: str, content: bytes) -> None:
        (self._folder / name).write_bytes(content)
        flush(self._folder / name)


def companions(folder: Path | None) -> Iterator[Path]:
    """The files of a Hugging Face folder that do not depend on the weights."""
    if folder is not None:
        yield from (file for name in COMPANIONS if (file := folder / name).is_file())


def save_model_files(
    job: Job, folder: Path, dtype: torch.dtype, seal: Seal, ranks: CheckpointGroup
) -> None:
    """Gather the weights on rank 0, which writes a Hugging Face folder and seals it.

    Adapters are written alone, or added to the weights (lora.save_merged). A model without a
    Hugging Face format is written as one .safetensors file. Every rank must call this. Rank 0 holds
    one file of the folder in memory, in `dtype`.
    """
    buffers: dict[str, Tensor] = {}
    own = {n: buffer.cpu() for n, buffer in job.buffers.items() if job.holds_first(n)}
    for found in ranks.gathered(own):
        buffers |= found
    names, adapters = Names.of(job), kind_of_files(job) == "peft"
    writer = None
    if job.world.is_first:
        text = {CONFIG_KEY: json.dumps(job.config.model_dump(mode="json", exclude_unset=True))}
        shapes = job.parameter_shapes()
        kept = {n: shape for n, shape in shapes.items() if bool(adapted_layer(n)) == adapters}
        writer = FolderWriter(
            folder,
            kept,
            names,
            dtype,
            buffers=None if adapters else buffers,
            text=None if adapters else text,
            adapters=adapters,
        )
    trained = job.whole(lambda p: p.detach() if p.requires_grad else None)
    for name, whole in trained if adapters else job.merged_parameters():
        if writer is not None:
            writer.add(name, whole)
    if writer is not None:
        config, base = None, job.config.checkpoint.initial_load_path
        if adapters:
            config = peft_config(shapes, names, job.config.lora, base)
        elif names.format is not None:
            config = names.format.config(names.sizes)
        files = writer.finish(config, folder_like(job) if config else None)
        seal({file.name: record_of(file) for file in files})


def kind_of_files(job: Job) -> str:
    """How the last step is stored with checkpoint.last_save_in_hf, as in Manifest.stored_as."""
    if Names.of(job).format is None:
        return "safetensors"
    return "peft" if job.config.lora.rank and not job.config.lora.save_merged else "huggingface"


def peft_config(
    shapes: Mapping[str, Sequence[int]], names: Names, section: LoRA, base: str | None
) -> dict[str, Any]:
    """adapter_config.json of peft, for a model whose parameters have these `shapes`.

    `base` is the folder of the model that the adapters change. `target_modules` are the last parts
    of names, or whole names if others end alike. Raises ConfigError for a layer whose weight a
    folder joins with others. Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
    """
    assert names.format is not None
    adapted = {f"{layer}.weight" for layer in filter(None, map(adapted_layer, shapes))}
    names.format.require_alone({n: shapes[n] for n in adapted}, names.sizes)
    matrices = {n: s for n, s in shapes.items() if len(s) == 2 and not adapted_layer(n)}
    places = {n: names.place(n, shape) for n, shape in matrices.items()}
    stored = {n: place.name.removesuffix(".weight") for n, place in places.items()}
    others = {stored[n].rpartition(".")[2] for n in matrices if n not in adapted}
    ends = {n: stored[n].rpartition(".")[2] for n in adapted}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": section.dropout,
        "target_modules": sorted({stored[n] if end in others else end for n, end in ends.items()}),
        "fan_in_fan_out": any(places[n].is_transposed for n in adapted),
        "bias": "none",
        "init_lora_weights": section.init_lora_weights,
    }


def folder_like(job: Job) -> Path | None:
    """The Hugging Face folder from which a job's weights or sizes come; None without one."""
    section = job.config.checkpoint
    given = (
        section.initial_load_path if section.initial_load_in_hf else None,
        getattr(job.resolved.model, "path", None),
    )
    folders = (Path(path).expanduser() for path in given if isinstance(path, str))
    return next(filter(is_hf_folder, folders), None)

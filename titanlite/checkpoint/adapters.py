"""Write the adapters of LoRA alone, in peft's format: adapter_config.json and their weights.

`PeftModel.from_pretrained(model, folder)` reads them. Source:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from titanlite.checkpoint.group import CheckpointGroup
from titanlite.checkpoint.huggingface import companions, folder_like
from titanlite.checkpoint.manifest import ADAPTERS, PEFT_CONFIG, record_of
from titanlite.checkpoint.storage import Seal
from titanlite.checkpoint.weights import Names, to_stored, write_file
from titanlite.files import flush
from titanlite.job import Job
from titanlite.modules.lora import adapted_layer
from titanlite.parallelize.lora.spec import LORA, LoRA


def kind_of_files(job: Job) -> str:
    """How the last step is stored with checkpoint.last_save_in_hf, as in Manifest.stored_as."""
    if Names.of(job).format is None:
        return "safetensors"
    is_alone = LORA.is_on(job.config) and not job.config.lora.save_merged
    return "peft" if is_alone else "huggingface"


def save_adapters(
    job: Job, folder: Path, dtype: torch.dtype, seal: Seal, ranks: CheckpointGroup
) -> None:
    """Gather the adapters on rank 0, which writes and seals them; every rank must call this."""
    found = (
        (name, whole.to("cpu", dtype, copy=True))
        for name, whole in job.whole(lambda p: p.detach() if p.requires_grad else None)
        if adapted_layer(name)
    )
    if not job.world.is_first:
        for _ in found:
            pass
        return
    like, section = folder_like(job), job.config.lora
    base = job.config.checkpoint.initial_load_path
    files = write_adapters(folder, found, job.parameter_shapes(), Names.of(job), section, base)
    for file in companions(like):
        files.append(folder / file.name)
        files[-1].write_bytes(file.read_bytes())
        flush(files[-1])
    seal({file.name: record_of(file) for file in files})


def write_adapters(
    folder: Path,
    adapters: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    names: Names,
    section: LoRA,
    base: str | None,
) -> list[Path]:
    """Write whole adapters to a new folder, of a model whose parameters have these `shapes`.

    `base` is the folder of the model that they change. Raises ConfigError for a layer whose weight
    a Hugging Face folder joins with others.
    """
    assert names.format is not None
    stored = {}
    for name, whole in adapters:
        place = names.place(name, whole.shape)
        stored[place.name] = to_stored(whole, place)
    weights = {n: shapes[n] for n in shapes if n.endswith(".weight") and len(shapes[n]) == 2}
    weights = {n: shape for n, shape in weights.items() if not adapted_layer(n)}
    adapted = {f"{layer}.weight" for layer in filter(None, map(adapted_layer, shapes))}
    names.format.require_alone({n: weights[n] for n in adapted}, names.sizes)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": section.rank,
        "lora_alpha": section.alpha,
        "lora_dropout": section.dropout,
        "target_modules": _targets(weights, adapted, names),
        "fan_in_fan_out": any(names.place(n, weights[n]).is_transposed for n in adapted),
        "bias": "none",
        "modules_to_save": None,
        "init_lora_weights": section.init_lora_weights,
    }
    files = [folder / PEFT_CONFIG, folder / ADAPTERS]
    files[0].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    flush(files[0])
    write_file(files[1], stored, {})
    return files


def _targets(
    weights: Mapping[str, Sequence[int]], adapted: Container[str], names: Names
) -> list[str]:
    """The adapted modules: the last part of a name, or the whole if others end alike."""
    stored = {n: names.place(n, shape).name.removesuffix(".weight") for n, shape in weights.items()}
    others = {stored[name].rpartition(".")[2] for name in weights if name not in adapted}
    ends = {name: stored[name].rpartition(".")[2] for name in weights if name in adapted}
    return sorted({stored[name] if end in others else end for name, end in ends.items()})

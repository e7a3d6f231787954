"""The folders of Hugging Face's own models: names are theirs already; torch-free until it is used.

GPT-2's joined projection is kept here as [in, 3, out] (model.py), and stored as [in, 3 x out].
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.files import shown
from titanlite.models.hf.config import FAMILIES, HFConfig
from titanlite.models.hf_format import HFFormat, HFTensor

# Keys of config.json about the file and not the model.
ABOUT_FILE = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "model_type"}
# Keys that do not change what the weights mean.
BESIDE = {
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range"),
    *("task_specific_params", "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "max_position_embeddings", "sliding_window", "use_sliding_window"),
}


def tensor(name: str, shape: Sequence[int], _: HFConfig) -> HFTensor:
    """Where a parameter is stored: under its own name."""
    is_joined = (".c_attn.weight" in name and len(shape) == 3) or (
        ".c_attn.bias" in name and len(shape) == 2
    )
    return HFTensor(name, is_flat=is_joined)


def config(sizes: HFConfig) -> dict[str, Any]:
    """config.json, as transformers writes it for this model."""
    from titanlite.models.hf.model import configuration

    return as_json(configuration(sizes))


def as_json(configuration: Any) -> dict[str, Any]:
    """The config.json of a configuration of transformers, with the class of its model."""
    import transformers

    found: dict[str, Any] = json.loads(configuration.to_json_string())
    classes = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if not found.get("architectures") and type(configuration) in classes:
        found["architectures"] = [classes[type(configuration)].__name__]
    return found


def sizes(found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [model] for a config.json; raises ValueError if transformers has no such type."""
    import transformers

    model_type = found.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(f"has model_type {model_type!r}, which transformers does not know")
    values = {key: value for key, value in found.items() if key not in ABOUT_FILE}
    return {"config_class": transformers.CONFIG_MAPPING[model_type].__name__, "values": values}


def differing(sizes: HFConfig, found: Mapping[str, Any]) -> list[str]:
    """The keys that the [model] gives and config.json has otherwise."""
    own, lines = sizes.given, []
    if sizes.config_class in FAMILIES:
        own["model_type"] = FAMILIES[sizes.config_class]
    for key in sorted((own.keys() & found.keys()) - BESIDE):
        if own[key] != found[key]:
            there, here = shown(repr(found[key])), shown(repr(own[key]))
            lines.append(f"has {key} {there}, and the [model] {here}")
    return lines


FORMAT = HFFormat(
    tensor=tensor,
    config=config,
    sizes=sizes,
    differing=differing,
    prefix="transformer.",
    ignored=("*.attn.bias", "*.attn.masked_bias", "*.rotary_emb.inv_freq"),
)

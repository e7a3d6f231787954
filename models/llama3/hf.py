"""How Llama 3 is stored in a Hugging Face folder: LlamaForCausalLM; torch-free.

The rows of wq and wk have another order there: here features 2i and 2i + 1 of a head are a rotary
pair, there i and head_dim / 2 + i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.errors import ConfigError
from titanlite.hf_format import HFFormat, HFTensor, require
from titanlite.models.llama3.config import Llama3Config

NO_EXPERTS = (
    "checkpoint: the experts of this model cannot be stored in a Hugging Face folder yet; use "
    "titanlite's own checkpoints"
)
OUTER = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
INNER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def tensor(name: str, shape: Sequence[int], sizes: Llama3Config) -> HFTensor:
    """Where a parameter is stored; raises ConfigError for a model with experts."""
    if sizes.num_experts:
        raise ConfigError(NO_EXPERTS)
    module = name.removesuffix(".weight")
    if module in OUTER:
        return HFTensor(f"{OUTER[module]}.weight")
    number, inner = module.split(".", 2)[1:]
    is_rotated = inner in ("attention.wq", "attention.wk")
    stored_as = f"model.layers.{number}.{INNER[inner]}.weight"
    return HFTensor(stored_as, head_dim=sizes.head_dim if is_rotated else None)


def config(sizes: Llama3Config) -> dict[str, Any]:
    """config.json, in the form that transformers 4 and 5 read; raises ConfigError for experts."""
    if sizes.num_experts:
        raise ConfigError(NO_EXPERTS)
    factor, original = (
        sizes.rope_scaling_factor,
        sizes.rope_scaling_original_max_position_embeddings,
    )
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": sizes.rope_scaling_low_freq_factor,
        "high_freq_factor": sizes.rope_scaling_high_freq_factor,
        "original_max_position_embeddings": original,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": sizes.dim,
        "intermediate_size": sizes.ffn_hidden_dim,
        "num_hidden_layers": sizes.n_layers,
        "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": int(original * factor),
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": sizes.rope_theta,
        "rope_scaling": scaling if factor != 1 else None,
        "tie_word_embeddings": sizes.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
    }


def sizes(found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [model] for a config.json; raises ValueError for what this model lacks."""
    require(found, "model_type", "llama")
    require(found, "hidden_act", "silu", default="silu")
    for key in ("attention_bias", "mlp_bias"):
        require(found, key, False, default=False)
    dim, heads = found.get("hidden_size", 4096), found.get("num_attention_heads", 32)
    require(found, "head_dim", dim // heads, None, default=None)
    # The hidden width is given, and derived from its multiplier here.
    hidden = found.get("intermediate_size", 11008)
    # transformers 5 has all in rope_parameters, 4 the scaling in rope_scaling.
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f'has rope_type "{kind}", and this model "default" or "llama3"')
    scaling = {"rope_scaling_factor": 1.0}
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if missing := [key for key in keys if key not in rope]:
            raise ValueError(f"lacks {missing[0]} of the rotary scaling")
        scaling = {f"rope_scaling_{key}": rope[key] for key in keys}
    return {
        "dim": dim,
        "n_layers": found.get("num_hidden_layers", 32),
        "n_heads": heads,
        "n_kv_heads": found.get("num_key_value_heads") or heads,
        "vocab_size": found.get("vocab_size", 32000),
        "multiple_of": 1,
        "ffn_dim_multiplier": (hidden + 0.5) / int(8 * dim / 3),
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", found.get("rope_theta", 10000.0))),
        "tie_embeddings": found.get("tie_word_embeddings", False),
        **scaling,
    }


FORMAT = HFFormat(
    tensor=tensor,
    config=config,
    sizes=sizes,
    compared=(
        *("dim", "n_layers", "n_heads", "kv_heads", "vocab_size", "ffn_hidden_dim", "norm_eps"),
        *("rope_theta", "rope_scaling_factor", "rope_scaling_low_freq_factor"),
        *("rope_scaling_high_freq_factor", "rope_scaling_original_max_position_embeddings"),
        "tie_embeddings",
    ),
    ignored=("*.rotary_emb.inv_freq",),
)

"""How Llama 3 is stored in a Hugging Face folder; torch-free.

    dense blocks                               LlamaForCausalLM
    experts                                    MixtralForCausalLM, with Mixtral's names
    experts with a bias or shared experts      Glm4MoeForCausalLM, with DeepSeek-V3's names

Glm4Moe has DeepSeek-V3's experts and names, and Llama's attention; DeepSeek-V3 itself has another
attention (MLA). The rows of wq and wk have another order in folders: here features 2i and 2i + 1 of
a head are a rotary pair, there i and head_dim / 2 + i.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titanlite.models.hf_format import HFFormat, HFTensor, require
from titanlite.models.llama3.config import Llama3Config

LLAMA, MIXTRAL, GLM = "llama", "mixtral", "glm4_moe"
ARCHITECTURES = {
    LLAMA: "LlamaForCausalLM",
    MIXTRAL: "MixtralForCausalLM",
    GLM: "Glm4MoeForCausalLM",
}
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
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}
# The experts' stacked weights and the router, whose names depend on the family.
EXPERTS = {
    MIXTRAL: {
        "moe.router.gate": "block_sparse_moe.gate",
        "moe.experts.w1": "block_sparse_moe.experts.{}.w1",
        "moe.experts.w2": "block_sparse_moe.experts.{}.w2",
        "moe.experts.w3": "block_sparse_moe.experts.{}.w3",
    },
    GLM: {
        "moe.router.gate": "mlp.gate",
        "moe.experts.w1": "mlp.experts.{}.gate_proj",
        "moe.experts.w2": "mlp.experts.{}.down_proj",
        "moe.experts.w3": "mlp.experts.{}.up_proj",
    },
}
BIAS = "mlp.gate.e_score_correction_bias"
# The values of keys that a config.json may leave out, as far as they differ from Llama's.
DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: {"vocab_size": 32000, "num_attention_heads": 32, "num_hidden_layers": 32},
    MIXTRAL: {
        "vocab_size": 32000,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    GLM: {
        "vocab_size": 151552,
        "num_attention_heads": 96,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
}
ONLY_MIXTRAL = {
    "moe_score_func": ("softmax", '"softmax"'),
    "moe_route_norm": (True, "true"),
    "moe_route_scale": (1.0, "1.0"),
    "moe_score_before_experts": (False, "false"),
    "moe_n_dense_layers": (0, "0"),
    "moe_interleave_layer_step": (1, "1"),
}
ONLY_GLM = {
    "moe_score_func": ("sigmoid", '"sigmoid"'),
    "moe_score_before_experts": (False, "false"),
    "moe_interleave_layer_step": (1, "1"),
}


def family(sizes: Llama3Config) -> str:
    """The model_type under which a model is stored."""
    if not sizes.num_experts:
        return LLAMA
    return GLM if sizes.expert_bias or sizes.moe_num_shared_experts else MIXTRAL


def unfit(sizes: Llama3Config) -> Iterator[tuple[str, str]]:
    """The keys of [model] that a folder cannot hold, and what to do."""
    kind = family(sizes)
    if kind == LLAMA:
        return
    otherwise = "or write titanlite's own checkpoint"
    if kind == MIXTRAL:
        why, needed = "the Hugging Face format of Mixtral", ONLY_MIXTRAL
    else:
        why = "the Hugging Face format of experts with a bias or shared experts (DeepSeek-V3's)"
        needed = ONLY_GLM
    for key, (value, legal) in needed.items():
        if (own := getattr(sizes, key)) != value:
            shown = str(own).lower() if isinstance(own, bool) else own
            yield f"model.{key}", f"{shown} does not fit {why}; give {legal}, {otherwise}"
    if kind == GLM:
        if not sizes.expert_bias:
            message = f"{why} has a bias, and this model none; give a coefficient, {otherwise}"
            yield "model.moe_load_balance_coeff", message
        if not sizes.moe_num_shared_experts:
            message = f"{why} has shared experts, and this model none; give 1 or more, {otherwise}"
            yield "model.moe_num_shared_experts", message
        if sizes.moe_num_experts < 2:
            yield "model.moe_num_experts", f"{why} needs 2 or more; give these, {otherwise}"


def tensor(name: str, shape: Sequence[int], sizes: Llama3Config) -> HFTensor:
    """Where a parameter or a balancing bias is stored."""
    module = name.removesuffix(".weight")
    if module in OUTER:
        return HFTensor(f"{OUTER[module]}.weight")
    number, inner = module.split(".", 2)[1:]
    block = f"model.layers.{number}."
    if inner == "moe.expert_bias":
        return HFTensor(block + BIAS)
    if inner in INNER:
        is_rotated = inner in ("attention.wq", "attention.wk")
        stored_as = f"{block}{INNER[inner]}.weight"
        return HFTensor(stored_as, head_dim=sizes.head_dim if is_rotated else None)
    stored_as = f"{block}{EXPERTS[family(sizes)][inner]}.weight"
    return HFTensor(stored_as, is_split="{}" in stored_as)


def config(sizes: Llama3Config) -> dict[str, Any]:
    """config.json, in the form that transformers 4 and 5 read, of a model that `unfit` accepts."""
    factor = sizes.rope_scaling_factor
    original = sizes.rope_scaling_original_max_position_embeddings
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": sizes.rope_scaling_low_freq_factor,
        "high_freq_factor": sizes.rope_scaling_high_freq_factor,
        "original_max_position_embeddings": original,
    }
    kind = family(sizes)
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
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
        "attention_dropout": 0.0,
        **_own_keys(kind, sizes),
    }


def _own_keys(kind: str, sizes: Llama3Config) -> dict[str, Any]:
    """The keys of config.json that only one family has, or in its own sense."""
    if kind == LLAMA:
        return {"attention_bias": False, "mlp_bias": False}
    if kind == MIXTRAL:
        return {
            "intermediate_size": sizes.expert_hidden_dim,
            "num_local_experts": sizes.moe_num_experts,
            "num_experts_per_tok": sizes.moe_top_k,
            "sliding_window": None,
        }
    return {
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "moe_intermediate_size": sizes.expert_hidden_dim,
        "n_routed_experts": sizes.moe_num_experts,
        "num_experts_per_tok": sizes.moe_top_k,
        "n_shared_experts": sizes.moe_num_shared_experts,
        "first_k_dense_replace": sizes.moe_n_dense_layers,
        "norm_topk_prob": sizes.moe_route_norm,
        "routed_scaling_factor": sizes.moe_route_scale,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }


def sizes(found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [model] for a config.json; raises ValueError for what this model lacks."""
    kind = str(found.get("model_type"))
    if kind in ("deepseek_v2", "deepseek_v3"):
        raise ValueError(f'has model_type "{kind}", whose attention (MLA) this model lacks')
    if kind not in DEFAULTS:
        require(found, "model_type", LLAMA)
    found = {**DEFAULTS[kind], **found}
    require(found, "hidden_act", "silu", default="silu")
    for key in ("attention_bias", "mlp_bias"):
        require(found, key, False, default=False)
    dim, heads = found.get("hidden_size", 4096), found["num_attention_heads"]
    require(found, "head_dim", dim // heads, None, default=None)
    # transformers 5 has all in rope_parameters, 4 the scaling in rope_scaling.
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f'has rope_type "{rope_type}", and this model "default" or "llama3"')
    scaling = {"rope_scaling_factor": 1.0}
    if rope_type == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        if missing := [key for key in keys if key not in rope]:
            raise ValueError(f"lacks {missing[0]} of the rotary scaling")
        scaling = {f"rope_scaling_{key}": rope[key] for key in keys}
    return {
        "dim": dim,
        "n_layers": found["num_hidden_layers"],
        "n_heads": heads,
        "n_kv_heads": found.get("num_key_value_heads") or heads,
        "vocab_size": found["vocab_size"],
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta", found.get("rope_theta", 10000.0))),
        "tie_embeddings": found.get("tie_word_embeddings", False),
        **scaling,
        **_feed_forwards(kind, found, rope, dim),
    }


def _feed_forwards(
    kind: str, found: Mapping[str, Any], rope: Mapping[str, Any], dim: int
) -> dict[str, Any]:
    """The keys of [model] for the feed-forwards."""
    # The hidden width is given, and derived from its multiplier here.
    hidden = found.get("intermediate_size", 11008)
    dense = {"multiple_of": 1, "ffn_dim_multiplier": (hidden + 0.5) / int(8 * dim / 3)}
    if kind == LLAMA:
        return {**dense, "moe_num_experts": 0}
    if kind == MIXTRAL:
        require(found, "sliding_window", None, default=None)
        return {
            "moe_num_experts": found["num_local_experts"],
            "moe_top_k": found["num_experts_per_tok"],
            "moe_hidden_dim": hidden,
            "moe_num_shared_experts": 0,
            "moe_load_balance_coeff": None,
            **{key: value for key, (value, _) in ONLY_MIXTRAL.items()},
        }
    require(found, "use_qk_norm", False, default=False)
    for key in ("n_group", "topk_group"):
        require(found, key, 1, default=1)
    rotated = {"partial_rotary_factor": found.get("partial_rotary_factor", 0.5), **rope}
    require(rotated, "partial_rotary_factor", 1.0)
    require(found, "num_nextn_predict_layers", 0, default=found.get("num_mtp_layers", 1))
    return {
        **dense,
        "moe_num_experts": found["n_routed_experts"],
        "moe_top_k": found["num_experts_per_tok"],
        "moe_hidden_dim": found["moe_intermediate_size"],
        "moe_num_shared_experts": found["n_shared_experts"],
        "moe_n_dense_layers": found["first_k_dense_replace"],
        "moe_route_norm": found["norm_topk_prob"],
        "moe_route_scale": found["routed_scaling_factor"],
        # A folder has the bias, and not by how much a step changes it.
        "moe_load_balance_coeff": Llama3Config.moe_load_balance_coeff,
        **{key: value for key, (value, _) in ONLY_GLM.items()},
    }


FORMAT = HFFormat(
    tensor=tensor,
    config=config,
    sizes=sizes,
    compared=(
        *("dim", "n_layers", "n_heads", "kv_heads", "vocab_size", "ffn_hidden_dim", "norm_eps"),
        *("rope_theta", "rope_scaling_factor", "rope_scaling_low_freq_factor"),
        *("rope_scaling_high_freq_factor", "rope_scaling_original_max_position_embeddings"),
        *("tie_embeddings", "moe_num_experts", "moe_top_k", "expert_hidden_dim"),
        *("moe_num_shared_experts", "moe_n_dense_layers", "moe_interleave_layer_step"),
        *("moe_score_func", "moe_route_norm", "moe_route_scale", "moe_score_before_experts"),
        "expert_bias",
    ),
    ignored=("*.rotary_emb.inv_freq",),
    unfit=unfit,
)

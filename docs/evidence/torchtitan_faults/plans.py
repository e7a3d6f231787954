"""Plans of TorchTitan that have one wrong entry each, altered before it is applied.

A job is named torchtitan_faults.plans:NAME, NAME being a key of ALTERED; run.py verifies them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
from torchtitan.models.common import decoder_sharding as dense
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.llama3 import config_registry as llama3

CONFIGS = {"llama3": llama3.llama3_debugmodel, "deepseek_v3": deepseek_v3.deepseek_v3_debugmodel}
MISSING = "missing"
SEQUENCE = dense.dense_sequence_parallel_placement()
TP, FSDP, HSDP, CP, EP = (
    f"--parallelism.{axis}_parallel{rest}_degree=2"
    for axis, rest in (
        ("tensor", ""),
        ("data", "_shard"),
        ("data", "_replicate"),
        ("context", ""),
        ("expert", ""),
    )
)
NO_SP = "--parallelism.no-enable_sequence_parallel"


@dataclass(frozen=True)
class Altered:
    """One wrong entry: of which module, and what it says instead."""

    module: str
    entry: str
    """A field of the module's ShardingConfig, with a key in brackets for those of names."""
    wrong: Any
    """A layout, MISSING, or the type on the axis tp of the layout that is there."""
    plan: tuple[str, ...] = (TP,)
    model: str = "llama3"
    names: str = ""
    """What the first sentence has to name, where that is not the module."""


def act(tp: Any, **other: Any) -> Any:
    return dense.dense_activation_placement(tp=tp, **other)


def state(tp: Any) -> Any:
    return dense.dense_param_placement(tp=tp)


ALTERED: dict[str, Altered] = {}


def _add(name: str, *arguments: Any, **more: Any) -> None:
    ALTERED[name] = Altered(*arguments, **more)


INV, R, P = spmd.I, spmd.R, spmd.P
_L = "layers.1"
# Sequences are sharded between the blocks.
_add("embedding_not_summed", "tok_embeddings", "out_src_shardings", act(R))
_add("embedding_columns", "tok_embeddings", "state_shardings[weight]", state(spmd.S(1)))
_add("attention_norm_invariant", f"{_L}.attention_norm", "state_shardings[weight]", state(INV))
_add("ffn_norm_invariant", f"{_L}.ffn_norm", "state_shardings[weight]", state(INV))
_add("norm_invariant", "norm", "state_shardings[weight]", state(INV))
_add("norm_sharded", "norm", "state_shardings[weight]", state(spmd.S(0)))
_add("norm_output_invariant", "norm", "out_dst_shardings", act(INV))
_add("norm_output_missing", "norm", "out_dst_shardings", MISSING)
_add("attention_input_invariant", f"{_L}.attention", "in_dst_shardings[x_BLD]", act(INV))
_add("attention_input_missing", f"{_L}.attention", "in_dst_shardings[x_BLD]", SEQUENCE)
_add("ffn_input_invariant", f"{_L}.feed_forward", "in_dst_shardings[x]", act(INV))
_add("ffn_input_missing", f"{_L}.feed_forward", "in_dst_shardings[x]", SEQUENCE)
_add("ffn_input_source", f"{_L}.feed_forward", "in_src_shardings[x]", act(R))
_add("wqkv_rowwise", f"{_L}.attention.qkv_linear.wqkv", "state_shardings[weight]", state(spmd.S(1)))
_add("wqkv_replicated", f"{_L}.attention.qkv_linear.wqkv", "state_shardings[weight]", state(R))
_add("wqkv_output", f"{_L}.attention.qkv_linear.wqkv", "out_src_shardings", act(P))
_add("wo_colwise", f"{_L}.attention.wo", "state_shardings[weight]", state(spmd.S(0)))
_add("wo_not_summed", f"{_L}.attention.wo", "out_src_shardings", act(R))
_add("w1_rowwise", f"{_L}.feed_forward.w1", "state_shardings[weight]", state(spmd.S(1)))
_add("w2_colwise", f"{_L}.feed_forward.w2", "state_shardings[weight]", state(spmd.S(0)))
_add("w2_not_summed", f"{_L}.feed_forward.w2", "out_src_shardings", act(R))
_add("w2_output_missing", f"{_L}.feed_forward.w2", "out_dst_shardings", MISSING)
_add("w2_output_other_dim", f"{_L}.feed_forward.w2", "out_dst_shardings", act(spmd.S(2)))
_add("lm_head_columns", "lm_head", "state_shardings[weight]", state(spmd.S(1)))
_add("lm_head_partial", "lm_head", "out_dst_shardings", act(P))
_add("rope_sharded", f"{_L}.attention.rope", "state_shardings[cache]", state(spmd.S(0)))
# Sequences are whole on every rank.
_NO = {"plan": (TP, NO_SP)}
_add("whole_embedding_missing", "tok_embeddings", "out_dst_shardings", MISSING, **_NO)
_add("whole_embedding_replicated", "tok_embeddings", "out_dst_shardings", act(R), **_NO)
_add("whole_norm_replicated", "norm", "state_shardings[weight]", state(R), **_NO)
_add("whole_ffn_norm_replicated", f"{_L}.ffn_norm", "state_shardings[weight]", state(R), **_NO)
_add("whole_norm_output_invariant", "norm", "out_dst_shardings", act(INV), **_NO)
_add("whole_attention_input_missing", f"{_L}.attention", "in_dst_shardings", MISSING, **_NO)
_add("whole_ffn_input_invariant", f"{_L}.feed_forward", "in_dst_shardings[x]", act(INV), **_NO)
_add("whole_wo_missing", f"{_L}.attention.wo", "out_dst_shardings", MISSING, **_NO)
_add("whole_wo_replicated", f"{_L}.attention.wo", "out_dst_shardings", act(R), **_NO)
_add("whole_w2_missing", f"{_L}.feed_forward.w2", "out_dst_shardings", MISSING, **_NO)
_add("whole_w2_replicated", f"{_L}.feed_forward.w2", "out_dst_shardings", act(R), **_NO)
# Experts.
_MOE = {"model": "deepseek_v3"}
_M = f"{_L}.moe"
_add("moe_input_invariant", _M, "in_dst_shardings[x_BLD]", act(INV), **_MOE)
_add("moe_not_summed", f"{_M}.routed_experts", "out_src_shardings", act(R), **_MOE)
_add("moe_output_missing", f"{_M}.routed_experts", "out_dst_shardings", MISSING, **_MOE)
_add(
    "experts_rowwise",
    f"{_M}.routed_experts.inner_experts",
    "state_shardings[w1_EFD]",
    state(spmd.S(2)),
    **_MOE,
)
_add("gate_invariant", f"{_M}.router.gate", "state_shardings[weight]", state(INV), **_MOE)
_add("gate_output_invariant", f"{_M}.router.gate", "out_dst_shardings", act(INV), **_MOE)
_add("shared_input_invariant", f"{_M}.shared_experts", "in_dst_shardings[x]", act(INV), **_MOE)
_add("shared_not_summed", f"{_M}.shared_experts.w2", "out_src_shardings", act(R), **_MOE)
_add("wkv_a_invariant", f"{_L}.attention.wkv_a", "state_shardings[weight]", state(INV), **_MOE)
_add("kv_norm_invariant", f"{_L}.attention.kv_norm", "state_shardings[weight]", state(INV), **_MOE)
_add("mla_input_invariant", f"{_L}.attention", "in_dst_shardings[x]", act(INV), **_MOE)
_add("mla_wo_not_summed", f"{_L}.attention.wo", "out_src_shardings", act(R), **_MOE)
_add("mla_ffn_norm_invariant", f"{_L}.ffn_norm", "state_shardings[weight]", state(INV), **_MOE)


def __getattr__(name: str) -> Callable[[], Any]:
    if name not in ALTERED:
        raise AttributeError(name)
    return lambda: _config(ALTERED[name])


def _config(altered: Altered) -> Any:
    config = CONFIGS[altered.model]()
    spec = config.model_spec
    apply = spec.parallelize_fn

    def parallelize(model: Any, **options: Any) -> Any:
        module = model.get_submodule(altered.module)
        module._sharding_config = _wrong(module._sharding_config, altered)
        return apply(model, **options)

    spec.parallelize_fn = parallelize
    return config


def _wrong(sharding: Any, altered: Altered) -> Any:
    """A module's ShardingConfig with the wrong entry; others may share the right one."""
    field, bracket, key = altered.entry.partition("[")
    value = None if altered.wrong is MISSING else altered.wrong
    if bracket:
        value = {**getattr(sharding, field), key.rstrip("]"): value}
    return replace(sharding, **{field: value})

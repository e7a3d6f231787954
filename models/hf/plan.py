"""How the models of models/hf are sharded: one plan for the families of config.py."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titanlite.models.hf.model import ATTENTION, gpt2_stage_forward, stage_forward
from titanlite.models.hf.styles import ColwiseConv1D, JoinedHeads, RowwiseConv1D
from titanlite.parallelize.plan import ParallelPlan
from titanlite.parallelize.styles import NormLocal


def plan(model: nn.Module) -> ParallelPlan:
    """Megatron's first form: heads, hidden units and vocabulary are sharded."""
    if hasattr(model, "transformer"):
        block = "transformer.h.*"
        return ParallelPlan(
            tensor_parallel={
                "transformer.wte": RowwiseParallel(input_layouts=Replicate()),
                f"{block}.attn": JoinedHeads(),
                f"{block}.attn.c_proj": RowwiseConv1D(),
                f"{block}.mlp.c_fc": ColwiseConv1D(),
                f"{block}.mlp.c_proj": RowwiseConv1D(),
                "lm_head": ColwiseParallel(output_layouts=Replicate()),
            },
            loss_parallel={
                "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            },
            blocks="transformer.h",
            embeddings=("transformer.wte", "transformer.wpe", "transformer.drop"),
            head=("transformer.ln_f", "lm_head"),
            attention=f"attn.{ATTENTION}",
            sequence_dim=None,
            stage_forward=gpt2_stage_forward,
        )
    layer = "model.layers.*"
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    rows = ["self_attn.o_proj", "mlp.down_proj"]
    # Norms of single heads are replicated, while each rank has other heads.
    norms = [name for name in ("q_norm", "k_norm") if _first_attention(model, name)]
    return ParallelPlan(
        tensor_parallel={
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            **{f"{layer}.{name}": ColwiseParallel() for name in columns},
            **{f"{layer}.{name}": RowwiseParallel() for name in rows},
            **{f"{layer}.self_attn.{name}": NormLocal() for name in norms},
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        },
        loss_parallel={
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        },
        blocks="model.layers",
        embeddings=("model.embed_tokens",),
        head=("model.norm", "lm_head"),
        attention=f"self_attn.{ATTENTION}",
        sequence_dim=None,
        stage_forward=stage_forward,
    )


def _first_attention(model: Any, name: str) -> bool:
    return hasattr(model.model.layers[0].self_attn, name)

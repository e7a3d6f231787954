"""How the models of models/hf are sharded: GPT-2 by a table, others by families.py."""

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from titanlite.models.hf.families import structure_of, tensor_parallel_of
from titanlite.models.hf.model import ATTENTION, gpt2_stage_forward, stage_forward
from titanlite.models.hf.styles import ColwiseConv1D, JoinedHeads, RowwiseConv1D
from titanlite.parallelize.plan import ParallelPlan, derive_plan


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
    structure = structure_of(model)
    if structure.is_derived:
        return derive_plan(model)
    has_output = isinstance(getattr(model, "lm_head", None), nn.Linear)
    return ParallelPlan(
        tensor_parallel={
            **tensor_parallel_of(model, structure),
            **({"lm_head": ColwiseParallel(output_layouts=Replicate())} if has_output else {}),
        },
        loss_parallel={"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
        if has_output
        else {},
        blocks=structure.blocks,
        embeddings=structure.embeddings,
        head=structure.head,
        attention=f"{structure.attention}.{ATTENTION}",
        sequence_dim=None,
        stage_forward=stage_forward,
    )

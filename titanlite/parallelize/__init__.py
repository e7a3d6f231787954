"""Make a plain model parallel: one folder for each feature, with an apply_x to call by hand.

parallelize.py applies those that a job's configuration asks for, in the order of steps.py, the one
order that works. Pipeline parallelism is not one of these steps: it splits the model into stages
first, and each stage then goes through the same steps.
"""

from typing import TYPE_CHECKING

from titanlite.lazy import lazy

if TYPE_CHECKING:
    from titanlite.parallelize.activation_checkpoint.apply import (
        RecomputationReport as RecomputationReport,
    )
    from titanlite.parallelize.activation_checkpoint.apply import apply_ac as apply_ac
    from titanlite.parallelize.compile.apply import CompileReport as CompileReport
    from titanlite.parallelize.compile.apply import apply_compile as apply_compile
    from titanlite.parallelize.context_parallel.apply import (
        ContextParallelReport as ContextParallelReport,
    )
    from titanlite.parallelize.context_parallel.apply import apply_cp as apply_cp
    from titanlite.parallelize.context_parallel.huggingface import (
        register_ring_attention as register_ring_attention,
    )
    from titanlite.parallelize.context_parallel.ring import RingAttention as RingAttention
    from titanlite.parallelize.context_parallel.ring import ring_attention as ring_attention
    from titanlite.parallelize.ddp.apply import DDPReport as DDPReport
    from titanlite.parallelize.ddp.apply import apply_ddp as apply_ddp
    from titanlite.parallelize.expert_parallel.apply import (
        ExpertParallelReport as ExpertParallelReport,
    )
    from titanlite.parallelize.expert_parallel.apply import apply_ep as apply_ep
    from titanlite.parallelize.float8.apply import Float8Report as Float8Report
    from titanlite.parallelize.float8.apply import apply_float8 as apply_float8
    from titanlite.parallelize.fsdp.apply import FSDPReport as FSDPReport
    from titanlite.parallelize.fsdp.apply import apply_fsdp as apply_fsdp
    from titanlite.parallelize.lora.apply import apply_lora as apply_lora
    from titanlite.parallelize.pipeline_parallel.apply import PipelineRunner as PipelineRunner
    from titanlite.parallelize.pipeline_parallel.apply import split_model as split_model
    from titanlite.parallelize.plan import ParallelPlan as ParallelPlan
    from titanlite.parallelize.plan import find_blocks as find_blocks
    from titanlite.parallelize.plan import find_plan as find_plan
    from titanlite.parallelize.tensor_parallel.apply import (
        TensorParallelReport as TensorParallelReport,
    )
    from titanlite.parallelize.tensor_parallel.apply import apply_tp as apply_tp
    from titanlite.parallelize.tensor_parallel.styles import EmbeddingLocal as EmbeddingLocal
    from titanlite.parallelize.tensor_parallel.styles import GatherColwise as GatherColwise
    from titanlite.parallelize.tensor_parallel.styles import NormLocal as NormLocal
    from titanlite.parallelize.tensor_parallel.styles import RowwiseLocal as RowwiseLocal
    from titanlite.parallelize.tensor_parallel.styles import TokenDropoutLocal as TokenDropoutLocal

PUBLIC = {
    "plan": ("ParallelPlan", "find_blocks", "find_plan"),
    "float8.apply": ("apply_float8", "Float8Report"),
    "lora.apply": ("apply_lora",),
    "tensor_parallel.apply": ("apply_tp", "TensorParallelReport"),
    "expert_parallel.apply": ("apply_ep", "ExpertParallelReport"),
    "context_parallel.apply": ("apply_cp", "ContextParallelReport"),
    "activation_checkpoint.apply": ("apply_ac", "RecomputationReport"),
    "compile.apply": ("apply_compile", "CompileReport"),
    "fsdp.apply": ("apply_fsdp", "FSDPReport"),
    "ddp.apply": ("apply_ddp", "DDPReport"),
    "pipeline_parallel.apply": ("split_model", "PipelineRunner"),
    "tensor_parallel.styles": (
        "GatherColwise",
        "RowwiseLocal",
        "NormLocal",
        "EmbeddingLocal",
        "TokenDropoutLocal",
    ),
    "context_parallel.ring": ("ring_attention", "RingAttention"),
    "context_parallel.huggingface": ("register_ring_attention",),
}
"""The public names, by module."""

lazy(__name__, PUBLIC)

"""Make a plain model parallel: one folder for each feature, with an apply_x to call by hand.

steps.py applies those that a job's configuration asks for, in the one order that works. Pipeline
parallelism is not one of these steps: it splits the model into stages first, and each stage then
goes through the same steps.
"""

from titanlite.parallelize.activation_checkpoint.apply import apply_ac
from titanlite.parallelize.compile.apply import apply_compile
from titanlite.parallelize.context_parallel.apply import apply_cp
from titanlite.parallelize.ddp.apply import apply_ddp
from titanlite.parallelize.expert_parallel.apply import apply_ep
from titanlite.parallelize.float8.apply import apply_float8
from titanlite.parallelize.fsdp.apply import apply_fsdp
from titanlite.parallelize.pipeline_parallel.apply import PipelineRunner, split_model
from titanlite.parallelize.plan import ParallelPlan, find_blocks, find_plan
from titanlite.parallelize.tensor_parallel.apply import apply_tp

__all__ = [
    "ParallelPlan",
    "PipelineRunner",
    "apply_ac",
    "apply_compile",
    "apply_cp",
    "apply_ddp",
    "apply_ep",
    "apply_float8",
    "apply_fsdp",
    "apply_tp",
    "find_blocks",
    "find_plan",
    "split_model",
]

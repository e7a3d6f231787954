"""Make a plain model parallel: one folder for each feature, with an apply_x to call by hand.

parallelize.py applies those that a job's configuration asks for, in the order of steps.py, the one
order that works. Pipeline parallelism is not one of these steps: it splits the model into stages
first, and each stage then goes through the same steps.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.parallelize.activation_checkpoint.apply import apply_ac as apply_ac
    from titanlite.parallelize.compile.apply import apply_compile as apply_compile
    from titanlite.parallelize.context_parallel.apply import apply_cp as apply_cp
    from titanlite.parallelize.ddp.apply import apply_ddp as apply_ddp
    from titanlite.parallelize.expert_parallel.apply import apply_ep as apply_ep
    from titanlite.parallelize.float8.apply import apply_float8 as apply_float8
    from titanlite.parallelize.fsdp.apply import apply_fsdp as apply_fsdp
    from titanlite.parallelize.pipeline_parallel.apply import PipelineRunner as PipelineRunner
    from titanlite.parallelize.pipeline_parallel.apply import split_model as split_model
    from titanlite.parallelize.plan import ParallelPlan as ParallelPlan
    from titanlite.parallelize.plan import find_blocks as find_blocks
    from titanlite.parallelize.plan import find_plan as find_plan
    from titanlite.parallelize.tensor_parallel.apply import apply_tp as apply_tp

# Imported at their first use: the configuration reads the specs below without torch.
_MODULES = {
    "ParallelPlan": "plan",
    "PipelineRunner": "pipeline_parallel.apply",
    "apply_ac": "activation_checkpoint.apply",
    "apply_compile": "compile.apply",
    "apply_cp": "context_parallel.apply",
    "apply_ddp": "ddp.apply",
    "apply_ep": "expert_parallel.apply",
    "apply_float8": "float8.apply",
    "apply_fsdp": "fsdp.apply",
    "apply_tp": "tensor_parallel.apply",
    "find_blocks": "plan",
    "find_plan": "plan",
    "split_model": "pipeline_parallel.apply",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"titanlite.parallelize.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'titanlite.parallelize' has no attribute {name!r}")

"""Context parallelism as a step: its row of the effective plan."""

from typing import Any

from titanlite.modules.attention import explain_choice
from titanlite.parallelize.context_parallel.apply import apply_cp
from titanlite.parallelize.part import DTYPES, FeatureStep, Part
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    model, config, meshes = part.model, part.config, part.meshes
    assert meshes.cp is not None
    layout = config.parallelism.context_parallel_load_balancer
    rotation = config.parallelism.context_parallel_rotate_method
    report = apply_cp(model, meshes.cp, layout=layout, rotate_method=rotation, plan=part.plan)
    dtype = DTYPES[config.training.param_dtype]
    model_config: Any = getattr(model, "config", None)
    inputs = meshes.cp.device_type, dtype, getattr(model_config, "head_dim", 64)
    name = f"CP {meshes.cp.size()}"
    note = f"{len(report.blocks)} blocks, {layout} layout, {rotation}; {explain_choice(*inputs)}"
    return PlanRow("context parallel", name, name, note)


STEP = FeatureStep(apply)

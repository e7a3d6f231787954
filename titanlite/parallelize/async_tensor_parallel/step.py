"""Async tensor parallelism as a step: its row of the effective plan."""

from __future__ import annotations

from titanlite.errors import ConfigError
from titanlite.parallelize.async_tensor_parallel.apply import (
    describe_rings,
    enable_symmetric_memory,
    has_ring_styles,
)
from titanlite.parallelize.part import FeatureStep, Part
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    """Overlap the communication over the tp axis with matrix products."""
    meshes, plan, whole = part.meshes, part.plan, part.whole
    device = None if meshes.tp is None else meshes.tp.device_type
    backend = None if device is None else part.config.parallelism.overlap_backend(device)
    enable_symmetric_memory(meshes.tp if backend == "symmetric_memory" else None)
    feature = "async tensor parallel"
    if backend is None or meshes.tp is None:
        return PlanRow(feature, "off", "off")
    if backend == "symmetric_memory":
        note = "inductor fuses on symmetric memory; fusions are reported after the first step"
        return PlanRow(feature, "symmetric memory", "symmetric memory", note)
    note = describe_rings(part.rings)
    if not part.rings:
        if whole is None or not has_ring_styles(whole, plan):
            raise ConfigError(
                "parallelism.enable_async_tensor_parallel: the tensor-parallel plan of "
                f"{type(part.model).__name__} has no style that can overlap; set it to false, or "
                "shard linear layers with GatherColwise and RowwiseLocal"
            )
        note = "this stage has nothing to overlap"
    return PlanRow(feature, "ring", "ring" if part.rings else "off", note)


STEP = FeatureStep(apply)

"""Async tensor parallelism as a step: its row of the effective plan."""

import torch
from torch import nn

from titanlite.config.resolve import ResolvedJob
from titanlite.config.schema import JobConfig
from titanlite.errors import ConfigError
from titanlite.parallelize.async_tensor_parallel.apply import (
    Fusions,
    describe_rings,
    enable_symmetric_memory,
    has_ring_styles,
    warn_of_small_chunks,
)
from titanlite.parallelize.part import FeatureStep, Part
from titanlite.parallelize.plan import ParallelPlan, find_blocks
from titanlite.plan_row import PlanRow


def apply(part: Part) -> PlanRow:
    meshes, plan, whole = part.meshes, part.plan, part.whole
    assert meshes.tp is not None
    feature = "async tensor parallel"
    if part.config.parallelism.overlap_backend(meshes.tp.device_type) == "symmetric_memory":
        enable_symmetric_memory(meshes.tp)
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


def warn_of_slow_rings(
    resolved: ResolvedJob, device: torch.device, model: nn.Module, plan: ParallelPlan
) -> str:
    """A line about rings of a compiled model on CPU with small chunks; "" without any."""
    config, dims = resolved.config, resolved.dims
    compiled = config.compile.enable and "model" in config.compile.components
    is_ring = config.parallelism.overlap_backend(device.type) == "ring"
    if device.type != "cpu" or not compiled or not is_ring:
        return ""
    at_once = config.training.local_batch_size
    if resolved.pipeline is not None:
        at_once = resolved.pipeline.microbatch_size
    num_tokens = at_once * resolved.seq_len // dims.num_token_shards
    return warn_of_small_chunks(model, plan, dims.tp, num_tokens)


def watch_fusions(
    config: JobConfig, device: torch.device, parts: list[nn.Module], plan: ParallelPlan
) -> Fusions | None:
    """None if the compiler is not asked to fuse, or if this rank's stages have no blocks."""
    backend = config.parallelism.overlap_backend(device.type)
    has_blocks = any(find_blocks(part, plan) for part in parts)
    return Fusions() if backend == "symmetric_memory" and has_blocks else None


STEP = FeatureStep(apply)

"""The two jobs that are compared: one under its plan, and the same on one process; torch-free."""

from __future__ import annotations

from typing import Any

from titanlite.config import JobConfig, ResolvedJob, make_config, override, resolve_job
from titanlite.mesh.parallel_dims import divisors

DTYPES = ("float64", "float32", "bfloat16")
"""What a job can be verified in; bfloat16 computes in it and keeps weights in float32."""

# What the reference takes at once: more would need more memory than a laptop has.
MOST_TOKENS = 16_384


def plan_job(job: ResolvedJob, dtype: str) -> ResolvedJob:
    """`job` in `dtype`, with its degrees and batch as numbers, and nothing beside training."""
    mixed = dtype == "bfloat16"
    config = override(
        job.config,
        {
            "training.dtype": "float32" if mixed else dtype,
            "training.mixed_precision_param": "bfloat16" if mixed else None,
            "training.mixed_precision_reduce": "float32" if mixed else None,
            "training.global_batch_size": job.global_batch_size,
            "parallelism.data_parallel_shard_degree": job.dims.dp_shard,
            "validation.enable": False,
            # A loss that is not finite is a difference to be named, or one that both have.
            "debug.non_finite": "ignore",
        },
    )
    return resolve_job(config, job.dims.world_size)


def reference_job(plan: ResolvedJob, *, num_parts: int = 1) -> ResolvedJob:
    """The job of `plan` on one process, with nothing parallel, recomputed, compiled or offloaded.

    The batch is taken at once, as far as memory should allow, or in at least `num_parts`.
    """
    values: dict[str, Any] = plan.config.model_dump(exclude_unset=True)
    values["parallelism"] = {"data_parallel_shard_degree": 1}
    values["activation_checkpoint"] = {"mode": "none"}
    values.pop("compile", None)
    batch = plan.global_batch_size
    training = values["training"]
    training.pop("enable_cpu_offload", None)
    training["local_batch_size"] = max(
        size
        for size in divisors(batch)
        if size == 1 or (size * plan.seq_len <= MOST_TOKENS and size * num_parts <= batch)
    )
    return resolve_job(make_config(values), 1)


def features_off(plan: JobConfig) -> list[dict[str, Any]]:
    """For each feature of `plan` that can be done without, the setting that turns it off."""
    checkpoints = plan.activation_checkpoint.mode != "none"
    offs: list[tuple[bool, dict[str, Any]]] = [
        (plan.compile.enable, {"compile.enable": False}),
        (checkpoints, {"activation_checkpoint.mode": "none"}),
        (plan.training.enable_cpu_offload, {"training.enable_cpu_offload": False}),
    ]
    # Memory budgets come with compile: without either, both are off.
    budget = plan.activation_checkpoint.mode == "memory_budget"
    return [off for is_on, off in offs if is_on and not (budget and "compile.enable" in off)]

"""The two jobs that are compared: one under its plan, and the same on one process; torch-free."""

from __future__ import annotations

from typing import Any

from titanlite.config import JobConfig, make_config, make_model_config, override
from titanlite.mesh.parallel_dims import ParallelDims, divisors

DTYPES = ("float64", "float32", "bfloat16")
"""What a job can be verified in; bfloat16 computes in it and keeps weights in float32."""

# What the reference takes at once: more would need more memory than a laptop has.
MOST_TOKENS = 16_384


def plan_job(config: JobConfig, dtype: str, dims: ParallelDims) -> JobConfig:
    """`config` in `dtype`, with its degrees and batch as numbers, and nothing beside training."""
    mixed = dtype == "bfloat16"
    training = config.training
    batch = training.global_batch_size
    return override(
        config,
        {
            "training.dtype": "float32" if mixed else dtype,
            "training.mixed_precision_param": "bfloat16" if mixed else None,
            "training.mixed_precision_reduce": "float32" if mixed else None,
            "training.global_batch_size": training.local_batch_size * dims.dp
            if batch == -1
            else batch,
            "parallelism.data_parallel_shard_degree": dims.dp_shard,
            "validation.enable": False,
            # A loss that is not finite is a difference to be named, or one that both have.
            "debug.non_finite": "ignore",
        },
    )


def reference_job(plan: JobConfig, *, num_parts: int = 1) -> JobConfig:
    """The job of `plan` on one process, with nothing parallel, recomputed, compiled or offloaded.

    The batch is taken at once, as far as memory should allow, or in at least `num_parts`.
    """
    values: dict[str, Any] = plan.model_dump(exclude_unset=True)
    values["parallelism"] = {"data_parallel_shard_degree": 1}
    values["activation_checkpoint"] = {"mode": "none"}
    values.pop("compile", None)
    batch, num_tokens = plan.training.global_batch_size, make_model_config(plan).num_tokens
    training = values["training"]
    training.pop("enable_cpu_offload", None)
    training["local_batch_size"] = max(
        size
        for size in divisors(batch)
        if size == 1 or (size * num_tokens <= MOST_TOKENS and size * num_parts <= batch)
    )
    return make_config(values)


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

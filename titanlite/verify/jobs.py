"""The two jobs that are compared: one under its plan, and the same on one process; torch-free."""

from __future__ import annotations

import math
from typing import Any

from titanlite.config import JobConfig, ResolvedJob, make_config, override, resolve_job
from titanlite.mesh.parallel_dims import divisors

DTYPES = ("float64", "float32", "bfloat16")
"""What a job can be verified in; bfloat16 computes in it and keeps weights in float32."""

# What the reference takes at once: more would need more memory than a laptop has.
MOST_TOKENS = 16_384
# In how many parts the reference takes its batch to be held against itself, where it has as many.
PARTS = 4
# Steps that are compared where nobody says how many, and the most that are chosen by themselves.
DEFAULT_STEPS, MOST_STEPS = 5, 200
# Global batches of a validation.
MOST_VALIDATION = 2


def plan_job(job: ResolvedJob, dtype: str) -> ResolvedJob:
    """`job` in `dtype`, with its degrees and batch as numbers, and nothing beside training."""
    mixed, training = dtype == "bfloat16", job.config.training
    config = override(
        job.config,
        {
            "training.dtype": "float32" if mixed else dtype,
            "training.mixed_precision_param": "bfloat16" if mixed else None,
            "training.mixed_precision_reduce": (training.mixed_precision_reduce or "float32")
            if mixed
            else None,
            "training.global_batch_size": job.global_batch_size,
            "parallelism.data_parallel_shard_degree": job.dims.dp_shard,
            # Of the whole set it would take longer than the steps.
            "validation.steps": MOST_VALIDATION if job.config.validation.enable else -1,
            # A loss that is not finite is a difference to be named, or one that both have.
            "debug.non_finite": "ignore",
        },
    )
    return resolve_job(config, job.dims.world_size)


def saving_job(plan: ResolvedJob, folder: str) -> ResolvedJob:
    """`plan` with checkpoints in `folder`, of which there are none yet."""
    config = override(
        plan.config,
        {
            "job.dump_folder": folder,
            "checkpoint.enable": True,
            "checkpoint.load_only": False,
            "checkpoint.create_seed_checkpoint": False,
            "checkpoint.initial_load_path": None,
            "checkpoint.initial_load_in_hf": False,
            "checkpoint.load_step": -1,
            "checkpoint.exclude_from_loading": [],
        },
    )
    return resolve_job(config, plan.dims.world_size)


Microbatches = tuple[tuple[range, ...], ...]
"""The sequences of the global batch that each microbatch has, a range for each data rank."""


def microbatches_of(plan: ResolvedJob) -> Microbatches | None:
    """The microbatches that the reference has to take, where what is in one changes the numbers.

    In float8 it does: a scale is over all sequences of a microbatch. The i-th is all data-parallel
    ranks' i-th together. None where the reference may cut its batch as it likes.
    """
    if not plan.config.converts_to_float8:
        return None
    size, dp = microbatch_size(plan), plan.dims.dp
    per_rank = plan.global_batch_size // dp
    return tuple(
        tuple(
            range(first, first + size) for first in range(start, plan.global_batch_size, per_rank)
        )
        for start in range(0, per_rank, size)
    )


def microbatch_size(plan: ResolvedJob) -> int:
    """Sequences that a data-parallel rank takes at once."""
    if plan.pipeline is not None:
        return plan.pipeline.microbatch_size
    return plan.config.training.local_batch_size


def reference_job(plan: ResolvedJob, *, num_parts: int = 1) -> ResolvedJob:
    """The job of `plan` on one process, with nothing parallel, recomputed, compiled or offloaded.

    The batch is taken at once, as far as memory should allow, or in at least `num_parts`; in
    microbatches as large as the plan's where those change the numbers (see microbatches_of).
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
    if plan.config.converts_to_float8:
        training["local_batch_size"] = microbatch_size(plan) * plan.dims.dp
        size = plan.config.validation.local_batch_size * plan.dims.dp
        values["validation"] = {**values.get("validation", {}), "local_batch_size": size}
    return resolve_job(make_config(values), 1)


def scheduled_lr(config: JobConfig, step: int) -> float:
    """The learning rate of `step`, counted from 1: warm up linearly, hold, decay.

    Written down once more, beside training/optimizer.py: what runs is held against this. The decay
    is laid out for one step more than there are (TorchTitan v0.2.2, components/lr_scheduler.py).
    """
    section, done = config.lr_scheduler, step - 1
    if done < config.warmup_steps:
        return config.optimizer.lr * step / config.warmup_steps
    left = config.schedule_steps - done
    if config.decay_steps == 0 or left >= config.decay_steps:
        return config.optimizer.lr
    share = max(left, 0) / config.decay_steps
    factor = {
        "linear": share,
        "sqrt": 1 - math.sqrt(1 - share),
        "cosine": (1 + math.cos(math.pi * (1 - share))) / 2,
    }[section.decay_type]
    least = section.min_lr_factor
    return config.optimizer.lr * (least + (1 - least) * factor)


def steps_until_stable(config: JobConfig) -> tuple[int, list[str]]:
    """Steps by which everything that a job begins on the way has begun, and what that is.

    At least DEFAULT_STEPS, at most the job's own or MOST_STEPS.
    """
    decay = config.schedule_steps + 1 - config.decay_steps
    begins = {
        "the end of the warm-up": config.warmup_steps,
        "the decay": decay if config.decay_steps else 0,
        "garbage collection": config.training.gc_freq,
    }
    most = min(max(config.training.steps, DEFAULT_STEPS), MOST_STEPS)
    # Two steps after it, so that what it leaves behind is seen too.
    steps = {what: step + 2 for what, step in begins.items() if step}
    chosen = min(max([DEFAULT_STEPS, *steps.values()]), most)
    told = [
        f"{what} at step {step - 2}{'' if step <= chosen else ', which is not reached'}"
        for what, step in steps.items()
    ]
    return chosen, told


def accumulation_pair(plan: ResolvedJob) -> tuple[ResolvedJob, ResolvedJob] | None:
    """One batch on one process, taken at once and in parts; None where there is one sequence.

    The batch is the job's, or as many sequences of it as memory should allow at once.
    """
    most = max(2, MOST_TOKENS // plan.seq_len)
    batch = max(size for size in divisors(plan.global_batch_size) if size <= most)
    if batch == 1:
        return None
    config = override(
        plan.config,
        {
            "training.global_batch_size": batch,
            "training.local_batch_size": batch,
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": 1,
            "parallelism.pipeline_parallel_degree": 1,
        },
    )
    whole = resolve_job(config)
    return reference_job(whole), reference_job(whole, num_parts=PARTS)


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

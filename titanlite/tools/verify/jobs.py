"""The two jobs that are compared: the job under its plan, and on one process; torch-free."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanlite.config import JobConfig, ResolvedJob, override, resolve_job
from titanlite.config.toml import drop, put
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import TABLE, divisors
from titanlite.parallelize.feature import Feature
from titanlite.parallelize.lora.spec import LORA
from titanlite.parallelize.steps import FEATURES, depends_on_microbatch, features_on
from titanlite.registry import SCHEDULERS, is_over_batch

Patch = Callable[[], AbstractContextManager[Any]]
"""A context manager that is entered while a plan is built and run, such as a bug to find."""


class Microbatches(NamedTuple):
    """A batch in microbatches: the i-th joins the i-th `size` sequences of `dp` ranks."""

    size: int
    dp: int

    def of(self, total: int) -> list[list[range]]:
        """For each microbatch its sequences in a batch of `total`, one range per rank."""
        own, size = total // self.dp, self.size
        return [
            [range(first, first + size) for first in range(start, total, own)]
            for start in range(0, own, size)
        ]


DTYPES = ("float64", "float32", "bfloat16")
"""The dtypes to verify in; bfloat16 computes in bfloat16 and keeps weights in float32."""

# The most tokens that the reference processes at once, limited by the memory of a laptop.
MOST_TOKENS = 16_384
# The number of parts in which the batch is run to compare one process with itself.
PARTS = 4
# The steps to compare by default, and the most that --until-stable chooses.
DEFAULT_STEPS, MOST_STEPS = 5, 200
# The global batches of a validation.
MOST_VALIDATION = 2


@dataclass(frozen=True)
class JobRun:
    """A run of a job: of a plan, or of its reference."""

    job: ResolvedJob
    steps: int
    patch: Patch | None = None
    microbatches: Microbatches | None = None
    """The batch is split into these instead of the job's own, on one process."""
    reloads: bool = False
    """Whether the job, which must have [checkpoint] enabled, is saved and loaded at its end."""
    replay: bool = False
    """Whether tokens go to the experts that the reference chose."""
    perturbed: int = 0
    """From what to draw the perturbation of weights and inputs; 0 for none."""


def plan_job(job: ResolvedJob, dtype: str) -> ResolvedJob:
    """`job` in `dtype`, with explicit degrees and batch size, and only what verifying needs."""
    mixed, training = dtype == "bfloat16", job.config.training
    config = override(
        job.config,
        {
            "training.dtype": "float32" if mixed else dtype,
            "training.mixed_precision_param": "bfloat16" if mixed else None,
            "training.mixed_precision_reduce": (training.mixed_precision_reduce or "float32")
            if mixed
            else None,
            "training.global_batch_size": job.batch_sizes[0][1],
            # A change of the batch that comes later would not be verified.
            "training.batch_size_schedule": [
                [step, size] for step, (_, size) in enumerate(job.batch_sizes[1:], 2)
            ],
            "parallelism.data_parallel_shard_degree": job.dims.dp_shard,
            # A validation over the whole set would take longer than the steps.
            "validation.steps": MOST_VALIDATION if job.config.validation.enable else -1,
            # These cannot be those of one process.
            "quantize.linear.float8.local_scales": False,
            # A non-finite loss is a difference to report, not a reason to stop.
            "debug.non_finite": "ignore",
            # In bfloat16, a change of a gradient by 1e-7 changes Muon's update by 2%.
            **(
                {}
                if mixed or job.config.optimizer.name != "Muon"
                else {"optimizer.ns_dtype": dtype}
            ),
            # While B is zero, A has no gradient.
            **({"lora.init_lora_weights": False} if LORA.is_on(job.config) else {}),
        },
    )
    return resolve_job(config, job.dims.world_size)


def saving_job(plan: ResolvedJob, folder: str) -> ResolvedJob:
    """`plan` with checkpoints enabled in `folder`, which has none yet."""
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


def microbatches_of(plan: ResolvedJob) -> Microbatches | None:
    """The microbatches that the reference must use, if the numbers depend on them; else None.

    In float8 they do, since a scale covers all sequences of a microbatch.
    """
    if not depends_on_microbatch(plan.config):
        return None
    return Microbatches(microbatch_size(plan), plan.dims.dp)


def microbatch_size(plan: ResolvedJob) -> int:
    """The number of sequences that a data-parallel rank processes at once."""
    if plan.pipeline is not None:
        return plan.pipeline.microbatch_size
    return plan.config.training.local_batch_size


def reference_job(plan: ResolvedJob, *, num_parts: int = 1) -> ResolvedJob:
    """The job of `plan` on one process, without the features that change no number.

    The batch is processed in as few parts as MOST_TOKENS allows, but in at least `num_parts`. If
    the numbers depend on the microbatches (see microbatches_of), these are as large as the plan's.
    A loss over the whole batch needs the batch at once.
    """
    values: dict[str, Any] = plan.config.model_dump(exclude_unset=True)
    values["parallelism"] = {"data_parallel_shard_degree": 1}
    switch_off(values, [feature for feature in FEATURES if not feature.changes_numbers])
    batch = math.gcd(*(size for _, size in plan.batch_sizes))
    training = values["training"]
    training["local_batch_size"] = max(
        size
        for size in divisors(batch)
        if size == 1 or (size * plan.seq_len <= MOST_TOKENS and size * num_parts <= batch)
    )
    if depends_on_microbatch(plan.config):
        training["local_batch_size"] = microbatch_size(plan) * plan.dims.dp
        size = plan.config.validation.local_batch_size * plan.dims.dp
        values["validation"] = {**values.get("validation", {}), "local_batch_size": size}
    if is_over_batch(plan.config.training.loss):
        training["local_batch_size"] = batch
        values["validation"] = {**values.get("validation", {}), "local_batch_size": batch}
    return resolve_job(JobConfig.from_dict(values), 1)


def scheduled_lr(config: JobConfig, step: int) -> float:
    """The learning rate of `step`, counted from 1: linear warm-up, constant, decay.

    This repeats the formula of training/optimizer.py on purpose: the run is checked against it. The
    decay would reach its end one step after the last (TorchTitan v0.2.2,
    components/lr_scheduler.py). A registered schedule is its own formula.
    """
    section, done = config.lr_scheduler, step - 1
    if not SCHEDULERS.is_built_in(section.decay_type):
        return config.optimizer.lr * SCHEDULERS[section.decay_type].load()(
            done,
            warmup_steps=config.warmup_steps,
            decay_steps=config.decay_steps,
            total_steps=config.schedule_steps,
            min_lr_factor=section.min_lr_factor,
        )
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


def own_decay(config: JobConfig, name: str) -> float:
    """The weight decay of the parameter `name`; repeats training/optimizer.py on purpose."""
    return (
        0.0 if is_named(name, config.optimizer.no_weight_decay) else config.optimizer.weight_decay
    )


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of these patterns."""
    return any(re.fullmatch(fnmatch.translate(pattern), name) for pattern in patterns)


def own_multiplier(config: JobConfig, name: str) -> float:
    """The factor on the learning rate of the parameter `name`; also repeated on purpose."""
    for pattern, factor in config.optimizer.lr_multipliers.items():
        if is_named(name, (pattern,)):
            return factor
    return 1.0


def steps_until_stable(config: JobConfig) -> tuple[int, list[str]]:
    """Enough steps for warm-up to end and decay and garbage collection to begin, and when they do.

    At most MOST_STEPS and the job's own number of steps, but at least DEFAULT_STEPS.
    """
    decay = config.schedule_steps + 1 - config.decay_steps
    begins = {
        "the end of the warm-up": config.warmup_steps,
        "the decay": decay if config.decay_steps else 0,
        "garbage collection": config.training.gc_freq,
    }
    most = min(max(config.training.steps, DEFAULT_STEPS), MOST_STEPS)
    # Two steps more, so that after-effects show up too.
    steps = {what: step + 2 for what, step in begins.items() if step}
    chosen = min(max([DEFAULT_STEPS, *steps.values()]), most)
    passed = [
        f"{what} at step {step - 2}{'' if step <= chosen else ', which is not reached'}"
        for what, step in steps.items()
    ]
    return chosen, passed


def accumulation_pair(plan: ResolvedJob) -> tuple[ResolvedJob, ResolvedJob] | None:
    """One job on one process with its batch at once and in parts.

    None for a single sequence, and for a loss over the whole batch, which is not in parts.

    The batch is the job's, or as many of its sequences as MOST_TOKENS allows at once.
    """
    most = max(2, MOST_TOKENS // plan.seq_len)
    batch = max(size for size in divisors(plan.global_batch_size) if size <= most)
    if batch == 1 or is_over_batch(plan.config.training.loss):
        return None
    changes: dict[str, Any] = dict.fromkeys(
        ("training.global_batch_size", "training.local_batch_size"), batch
    )
    changes["training.batch_size_schedule"] = []
    for axis in TABLE:
        if axis.batch in ("samples", "routed") or axis.weights == "stages":
            changes[f"parallelism.{axis.degree_key}"] = 1
    config = override(plan.config, changes)
    whole = resolve_job(config)
    return reference_job(whole), reference_job(whole, num_parts=PARTS)


def switch_off(values: dict[str, Any], features: Iterable[Feature]) -> None:
    """Switch features off in the tables of a job, and remove their own sections."""
    for feature in features:
        for name in feature.sections:
            drop(values, name)
        for name, value in feature.off.items():
            put(values, name, value)


def features_off(plan: JobConfig) -> list[Mapping[str, Any]]:
    """For each optional feature that `plan` uses, the settings that turn it off."""
    offs = [feature.off for feature in features_on(plan) if not feature.changes_numbers]
    return [off for off in offs if _is_change(plan, off)]


def _is_change(plan: JobConfig, changes: Mapping[str, Any]) -> bool:
    """Whether these settings change a job, and it can run: a memory budget, say, needs compile."""
    try:
        return override(plan, changes) != plan
    except ConfigError:
        return False

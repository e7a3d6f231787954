"""Rows of the effective plan about the run as a whole: its device, its batch, its learning rate.

The rows of the parallel features come from the steps that applied them (titanlite/parallelize).
"""

from __future__ import annotations

from typing import Any

from titanlite.config.keys import job_keys
from titanlite.config.schema import JobConfig
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.plan_row import PlanRow


def run_rows(
    config: JobConfig,
    dims: ParallelDims,
    device_type: str,
    *,
    num_local_ranks: int,
    num_gpus: int,
) -> list[PlanRow]:
    """What was asked for and what is active, of the job on `device_type`.

    `num_gpus` are the GPUs of this machine, `num_local_ranks` the ranks that run on it.
    """
    return [
        _device(config.job.device, device_type, num_local_ranks, num_gpus),
        _batch(config, dims),
        _learning_rate(config),
    ]


def name_idle_keys(config: JobConfig) -> str:
    """One line about the keys that the job sets and that have no effect; "" without any."""
    idle = []
    for key in job_keys().values():
        if key.inert:
            section: Any = config
            for name in key.section.split("."):
                section = getattr(section, name)
            if getattr(section, key.leaf) != key.default:
                idle.append(key.name)
    if not idle:
        return ""
    return f"no effect here, as the TorchTitan feature is not on: {', '.join(idle)}"


def _device(asked: str, active: str, num_ranks: int, num_gpus: int) -> PlanRow:
    if asked != "auto":
        return PlanRow("device", asked, active)
    if active == "cuda":
        return PlanRow("device", active, active, "auto: every rank has a GPU")
    if num_gpus == 0:
        return PlanRow("device", active, active, "auto: this machine has no GPU")
    gpus = f"{num_gpus} GPU{'s' * (num_gpus > 1)}"
    return PlanRow("device", "cuda", active, f"auto: {num_ranks} ranks need more than {gpus}")


def _batch(config: JobConfig, dims: ParallelDims) -> PlanRow:
    asked, local = config.training.global_batch_size, config.training.local_batch_size
    at_once = local * dims.dp
    size = at_once if asked == -1 else asked
    note = f"{local} sequences on each of {dims.dp} data-parallel ranks"
    if dims.dp == 1:
        note = f"{local} sequences at once"
    if size > at_once:
        note += f", {size // at_once} times a step"
    if asked == -1:
        note += "; it depends on the plan: give training.global_batch_size to fix it"
    return PlanRow("global batch", str(asked), str(size), note)


def _learning_rate(config: JobConfig) -> PlanRow:
    section, total = config.lr_scheduler, config.schedule_steps
    warmup, decay = config.warmup_steps, config.decay_steps
    # A default that gives way is not a request.
    is_set = "warmup_steps" in section.model_fields_set
    asked_warmup = section.warmup_steps if is_set else warmup
    asked_decay = decay if section.decay_ratio is None else round(total * section.decay_ratio)
    note = f"of {total} steps; {section.decay_type} decay"
    cut = [
        name
        for name, is_cut in (("warm-up", asked_warmup > warmup), ("decay", asked_decay > decay))
        if is_cut
    ]
    if cut:
        of = "run" if section.total_steps is None else "schedule"
        note = f"{' and '.join(cut)} cut to the {total} steps of the {of}"
    return PlanRow(
        "warm-up + decay",
        f"{asked_warmup} + {asked_decay} steps",
        f"{warmup} + {decay} steps",
        note,
    )

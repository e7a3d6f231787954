"""The memory that a job takes on the machine that it would start on. Torch-free.

`least_bytes` is a formula; `planned_bytes` reads the cache of plans; `print_memory` plans the job
([memory_estimation]).
"""

from __future__ import annotations

import sys
from typing import Any

from titanlite.config import JobConfig, Reading, ResolvedJob, resolve_job
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models import find_model
from titanlite.observe.terminal import terminal_width, uses_color
from titanlite.plan.events import ITEMSIZE

MOMENTS = {"AdamW": 2, "Adam": 2}
OWN_MODELS = "titanlite.models."
# A composed plan can exceed the real peak by this share; compiled blocks keep even less.
PLAN_ERROR = 0.25


def least_bytes(config: JobConfig, model: Any, dims: ParallelDims) -> int:
    """The bytes that all ranks of a job hold at least in a step; 0 if the model is of unknown size.

    They are those of the parameters, once for each replica of DDP or HSDP. titanlite's own models
    train all parameters, which adds their gradients and the optimizer's state.
    """
    num_parameters = getattr(model, "num_parameters", None)
    if not isinstance(num_parameters, int):
        return 0
    tensors, optimizer = 1, config.optimizer
    source = find_model(config.model.name).config
    is_own = isinstance(source, str) and source.startswith(OWN_MODELS)
    if is_own and not config.checkpoint.create_seed_checkpoint:
        tensors += 1 + MOMENTS.get(optimizer.name, 1 if optimizer.momentum else 0)
    return num_parameters * ITEMSIZE[config.training.dtype] * tensors * dims.dp_replicate


def planned_bytes(job: ResolvedJob) -> int:
    """The bytes of all ranks at their peaks, by the job's plan and less its error; 0 if unknown.

    Known are jobs whose pieces are in the cache: nothing is traced.
    """
    from titanlite.plan.cache import known_pieces
    from titanlite.plan.compose import compose
    from titanlite.plan.composition import has_experts

    if has_experts(job):
        return 0
    pieces = known_pieces(job)
    if pieces is None:
        return 0
    peaks = [one.peak().num_bytes for one in compose(job, pieces)]
    return round((1 - PLAN_ERROR) * sum(peaks) * job.dims.world_size / len(peaks))


def print_memory(reading: Reading, num_ranks: int | None, *, is_first: bool) -> None:
    """Print the memory of each pipeline stage's ranks at the peak of a step.

    `num_ranks` is that of the world, None for as many as the degrees need. Only the first rank of a
    world plans. Raises ConfigError with all problems of the job.
    """
    reading.draft(num_ranks)
    config = reading.require()
    if not is_first:
        return
    from titanlite.plan.command import plannable
    from titanlite.plan.planning import plan_job
    from titanlite.plan.report import show_head, show_memory, show_remarks

    config, notes = plannable(config)
    plan = plan_job(resolve_job(config, num_ranks))
    plan.notes.extend(notes)
    width, color = terminal_width(sys.stdout), uses_color(sys.stdout)
    sections = [
        show_head(plan, width),
        show_memory(plan, width, color),
        [*show_remarks(plan, width), "memory_estimation: nothing was trained"],
    ]
    print("\n\n".join("\n".join(lines) for lines in sections))

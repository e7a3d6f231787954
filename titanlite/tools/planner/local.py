"""The memory that a job takes on the machine that it would start on. Torch-free.

`planned_bytes` reads the cache of plans; `print_memory` plans the job ([memory_estimation]). The
commands hand both to a run, which knows no planner.
"""

from __future__ import annotations

import sys

from titanlite.config import Reading, ResolvedJob, resolve_job
from titanlite.observe.terminal import telling, terminal_width
from titanlite.tools.figures.palette import uses_color
from titanlite.tools.options import say

# A composed plan can exceed the real peak by this share; compiled blocks keep even less.
PLAN_ERROR = 0.25


def planned_bytes(job: ResolvedJob) -> int:
    """The bytes of all ranks at their peaks, by the job's plan and less its error; 0 if unknown.

    Known are jobs whose pieces are in the cache: nothing is traced.
    """
    from titanlite.tools.planner.cache import known_pieces
    from titanlite.tools.planner.compose import compose
    from titanlite.tools.planner.composition import has_experts

    if has_experts(job):
        return 0
    pieces = known_pieces(job)
    if pieces is None:
        return 0
    peaks = [one.peak().num_bytes for one in compose(job, pieces)]
    return round((1 - PLAN_ERROR) * sum(peaks) * job.dims.world_size / len(peaks))


@telling("tracing a step of one rank of each pipeline stage")
def print_memory(reading: Reading, num_ranks: int | None, *, is_first: bool) -> None:
    """Print the memory of each pipeline stage's ranks at the peak of a step.

    `num_ranks` is that of the world, None for as many as the degrees need. Only the first rank of a
    world plans. Raises ConfigError with all problems of the job.
    """
    reading.draft(num_ranks)
    config = reading.require()
    if not is_first:
        return
    from titanlite.tools.planner.planning import plan_job, plannable
    from titanlite.tools.planner.report import show_head, show_memory, show_notes, show_top

    config, notes = plannable(config)
    plan = plan_job(resolve_job(config, num_ranks))
    plan.notes.extend(notes)
    width, color = terminal_width(sys.stdout), uses_color(sys.stdout)
    sections = [
        show_top(plan, width),
        show_head(plan, width),
        show_memory(plan, width, color),
        [*show_notes(plan, width), "memory_estimation: nothing was trained"],
    ]
    say("\n\n".join("\n".join(lines) for lines in sections))

"""`titanlite.plan`: what a job's step takes on any number of ranks, before it runs.

result = titanlite.plan("configs/plan/llama_405b.toml", hardware="h100")
print(result.peak_bytes, result.step_seconds)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config import JobConfig, resolve_job
from titanlite.config.load import read_any
from titanlite.tools.planner.advice import advise
from titanlite.tools.planner.hardware import load_hardware
from titanlite.tools.planner.planning import Advice, JobPlan, plan_job, plannable
from titanlite.tools.planner.report import figures, show


@dataclass(frozen=True)
class PlanResult:
    """The result of `titanlite.plan`; `print` shows what the command shows below its first part."""

    plan: JobPlan
    """Memory, communication and time of each rank that stands for a pipeline stage."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of memory of any rank."""
        return self.plan.peak_bytes

    @property
    def step_seconds(self) -> float | None:
        """The time of a step; None without hardware."""
        prediction = self.plan.prediction
        return None if prediction is None else prediction.step.seconds

    @property
    def advice(self) -> list[Advice]:
        """At most three changes of the job that help, each with its plan."""
        return self.plan.advice

    @property
    def figures(self) -> dict[str, Any]:
        """All figures, as `titanlite plan --json` writes them."""
        return figures(self.plan)

    def __str__(self) -> str:
        return show(self.plan)


def plan(
    job: JobConfig | Mapping[str, Mapping[str, Any]] | str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    ranks: int | None = None,
    hardware: str | None = None,
) -> PlanResult:
    """Trace a step of a job in a world of any size, in this process, as `titanlite plan`.

    `job` and `changes` are those of `verify`. `ranks` is by default what the job's degrees need.
    With `hardware`, the name of one that titanlite knows or a TOML file, the plan has times. Raises
    ConfigError with all mistakes of the job.
    """
    device = None if hardware is None else load_hardware(hardware)
    reading = read_any(job, changes)
    reading.draft(ranks)
    config, notes = plannable(reading.require(), (), device)
    resolved = resolve_job(config, ranks)
    found = plan_job(resolved, device, is_compiled=config.compile.enable)
    found.advice.extend(advise(found, resolved))
    found.notes.extend(notes)
    return PlanResult(found)

"""What a comparison of a parallel run with one process has found; torch-free."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titanlite.config import ResolvedJob
from titanlite.errors import RankError
from titanlite.tools.verify.differences import (
    Disagreement,
    Key,
    Tolerance,
    UnequalReplicas,
    badness,
    failures,
)
from titanlite.tools.verify.economy import Traffic, notes_on
from titanlite.tools.verify.record import RankRun


@dataclass(kw_only=True)
class Result:
    """The differences of a parallel run from one process, and what they mean."""

    differences: list[dict[Key, float]] = field(default_factory=list)
    tolerance: Tolerance = field(default_factory=lambda: Tolerance("float64"))
    failures: list[Disagreement] = field(default_factory=list)
    splits: list[UnequalReplicas] = field(default_factory=list)
    error: RankError | None = None
    """The exception of a rank, if the parallel run did not end."""
    narrowed: tuple[str, ...] = ()
    """Modules that compute in a narrower dtype than that of their input, with both dtypes."""
    problems: list[str] = field(default_factory=list)
    """Sentences about what is wrong even if no number differs."""
    findings: list[str] = field(default_factory=list)
    """What is wrong, the most likely cause first."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what is unusual but not wrong, and about what was not compared."""
    needless: list[str] = field(default_factory=list)
    """Of a run that agrees: what it sends or reads needlessly."""
    doubts: list[str] = field(default_factory=list)
    """Of a run that agrees: why an error may not have shown."""
    traffic: list[Traffic] = field(default_factory=list)
    """What each rank sent in one step; empty if that was compiled."""
    seconds: float = 0.0
    threads: bool = False
    """Whether the ranks were threads of one process."""
    device_type: str = "cpu"

    @property
    def agrees(self) -> bool:
        return not (self.error or self.problems or self.failures or self.splits)

    def judge(self, tolerance: Tolerance) -> None:
        """Compare the differences with this tolerance."""
        self.tolerance = tolerance
        self.failures = failures(self.differences, tolerance)

    def look_at_traffic(self, runs: Sequence[RankRun]) -> None:
        """Keep what the ranks sent; needless communication is told of a run that agrees."""
        self.traffic = [run.traffic for run in runs if run.traffic.sent]
        if self.agrees and len(self.traffic) == len(runs):
            self.needless = notes_on(self.traffic)

    @property
    def error_finding(self) -> str:
        """The finding that says only that the parallel run did not end."""
        return f"the plan does not run: {self.error}"

    @property
    def cause(self) -> str:
        """The most likely cause of the differences; empty if there are none."""
        return self.findings[0] if self.findings else ""

    @property
    def worst(self) -> tuple[int, Key]:
        """The step and key of the difference that is largest relative to its tolerance."""
        return max(
            (
                (step, key)
                for step, of_step in enumerate(self.differences)
                for key in of_step
                if key[0] != "start"
            ),
            key=lambda place: badness(
                self.differences[place[0]][place[1]], self.tolerance.of(*place)
            ),
        )

    @property
    def margin(self) -> float:
        """The smallest tolerance divided by its difference; infinite if all are equal."""
        step, key = self.worst
        times = badness(self.differences[step][key], self.tolerance.of(step, key))
        return 1 / times if times else math.inf


@dataclass
class Verification(Result):
    """The result of verifying one job."""

    job: ResolvedJob
    """The job under its plan, as it ran."""
    dtype: str
    num_steps: int
    reference_parts: int
    """The number of parts in which the reference processes its batch."""
    wrong_sums: str = ""
    """How the batch in parts differs from the undivided batch, on one process."""
    resume_problems: list[str] = field(default_factory=list)
    """Sentences about what is wrong with a run that resumes from the plan's checkpoint."""
    replays: bool = False
    """Whether tokens went to the experts that the reference chose."""
    given: float | str | None = None
    """The tolerance that was asked for: a number, or "sensitivity"."""
    moved: list[str] = field(default_factory=list)
    """Sentences about tokens that the plan routes to other experts than the reference."""

    def ran(self, source: str, shrunk: Sequence[str]) -> dict[str, Any]:
        """What ran, as JSON: a job, what was made smaller in it, its degrees and its dtype."""
        degrees = self.job.dims.degrees
        return {"config": source, "shrunk": list(shrunk), "degrees": degrees, "dtype": self.dtype}

    @property
    def agrees(self) -> bool:
        return super().agrees and not self.wrong_sums and not self.resume_problems

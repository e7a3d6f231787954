"""What a comparison of a parallel run with one process has found; torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titanlite.errors import RankError
from titanlite.tools.verify.differences import Failure, Key, Split, Tolerance, badness


@dataclass(kw_only=True)
class Result:
    """The differences of a parallel run from one process, and what they mean."""

    differences: list[dict[Key, float]] = field(default_factory=list)
    tolerance: Tolerance = field(default_factory=lambda: Tolerance("float64"))
    failures: list[Failure] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    error: RankError | None = None
    """The exception of a rank, if the parallel run did not end."""
    narrowed: tuple[str, ...] = ()
    """Modules that compute in a narrower dtype than that of their input, with both dtypes."""
    problems: list[str] = field(default_factory=list)
    """Sentences about what is wrong even if no number differs."""
    findings: list[str] = field(default_factory=list)
    """What is wrong, the most likely cause first."""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        return not (self.error or self.problems or self.failures or self.splits)

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

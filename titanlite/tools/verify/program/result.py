"""What `titanlite.compare` returns; torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.verify.report import format_result
from titanlite.tools.verify.result import Result


@dataclass
class Comparison(Result):
    """The result of comparing parallel code with its reference; `print` shows all of it."""

    grid: Grid
    dtype: str
    num_steps: int
    name: str = ""
    """The name of the function that builds the parallel model."""
    losses: str = ""
    """How the ranks' losses were combined: "mean" or "sum" over the parts of the batch, or a sum
    that was divided; "" if each rank's loss was compared by itself."""

    def __str__(self) -> str:
        """The verdict and the diagnosis, then what was compared, and the table of differences."""
        steps = f"{self.num_steps} step{'s' * (self.num_steps > 1)}"
        ranks = f"{self.grid.world_size} rank{'s' * (self.grid.world_size > 1)}"
        ranks += " as threads" * self.threads
        lines = [
            f"parallel   {self.name}: {self.grid.describe()}, {ranks}",
            f"reference  the same batches on one process; {self.dtype}, {steps}",
        ]
        if self.losses:
            lines.append(f"loss       the {self.losses} over the parts of the batch")
        lines = [format_result(self, self.dtype, "\n".join(lines))]
        if self.error is not None:
            lines += ["", self.error.rank_traceback]
        return "\n".join(lines).rstrip()

    @property
    def error_finding(self) -> str:
        return f"the parallel code does not run: {self.error}"

    def check(self) -> Comparison:
        """Raises AssertionError, with what `print` shows, unless the parallel code agrees."""
        if not self.agrees:
            raise AssertionError(f"\n{self}")
        return self

"""What an experiment returns: a table of text; and measurements with their spread."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# With fewer samples on each side, chance separates two equal distributions too often.
FEWEST_SAMPLES = 4


@dataclass(frozen=True)
class Table:
    """The result of an experiment: a caption, named columns, and rows of text."""

    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self, scale: float = 1, digits: int = 1) -> str:
        """The median and the range, each multiplied by `scale`: "5.1 (4.9 to 6.0)"."""
        middle, low, high = (
            f"{scale * value:.{digits}f}"
            for value in (self.median, min(self.values), max(self.values))
        )
        return f"{middle} ({low} to {high})"


def compared(before: Samples, after: Samples) -> str:
    """Whether a change made times smaller: "faster by 30%", "slower by 4%" or "no difference seen".

    It is faster (slower) only if every sample after the change is below (above) every sample before
    it. If the change had no effect, 5 samples on each side would be separated by chance in 1 of 126
    experiments, and 4 in 1 of 35.
    """
    if min(len(before.values), len(after.values)) < FEWEST_SAMPLES:
        return f"not judged: fewer than {FEWEST_SAMPLES} repeats"
    change = after.median / before.median - 1
    if max(after.values) < min(before.values):
        return f"faster by {-change:.0%}"
    if min(after.values) > max(before.values):
        return f"slower by {change:.0%}"
    return "no difference seen"

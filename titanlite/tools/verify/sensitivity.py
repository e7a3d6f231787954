"""How far a correct plan may be from one process where numbers are rounded coarsely; torch-free.

In bfloat16 and float32 the reference is run again, with its weights and inputs perturbed by as much
as rounding may (perturbation.py). What moves a tensor there moves it under a correct plan too, by
about as much, since each operator rounds its result once. Such differences are root mean squares
over a tensor. AdamW turns the sign of an update whose gradient is nearly zero, and so the largest
difference of a few elements says little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlite.tools.verify.differences import Key, Tolerance

# How often the reference is perturbed, each time by other numbers.
NUM_PERTURBED = 3
# The tolerance is this many times the largest change. Correct plans differ by at most 2.2 times it
# (docs/verify.md): they also round where their ranks' sums meet.
MARGIN = 5.0
# How far a number near 1 may be from its rounded one.
HALF_SPACING = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8}
SENSITIVITY = "sensitivity"
"""As a tolerance: measure it in this way."""


@dataclass
class Sensitivity(Tolerance):
    """MARGIN times the change of each tensor when the reference is perturbed, which `rounding` has.

    At least that of half of the tensors of its kind, and `least`, half the spacing of the dtype of
    results: a change can be small by chance.
    """

    margin: float = MARGIN
    least: float = HALF_SPACING["float32"]

    def _make(self, step: int, key: Key) -> float:
        usual = super()._make(step, key)
        if key[0] in ("start", "lr") or math.isinf(usual):
            return usual
        return self.margin * max(*self._moved(key, step + 1), self.least)


@dataclass(kw_only=True)
class Given(Tolerance):
    """A tolerance that the caller has given."""

    limit: float = 0.0

    def _make(self, step: int, key: Key) -> float:
        return 0.0 if key[0] == "start" else self.limit

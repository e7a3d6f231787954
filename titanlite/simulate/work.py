"""The words of the scheme: a piece of work, and the two workers a strategy gives it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from titanlite.errors import TitanliteError


class SimulationError(TitanliteError):
    """A simulation was asked for something that cannot be; the message says what and where."""


class Direction(IntEnum):
    """WEIGHT is the weight-gradient part of a backward pass that is split in two."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


class Work(NamedTuple):
    """One pass of one batch through one stage of the model."""

    stage: int
    batch: int
    direction: Direction

    def __str__(self) -> str:
        return f"{'fbw'[self.direction]}{self.stage}.{self.batch}"


class ComputeAndWeightWorkers(NamedTuple):
    """Where a work runs, and where the weights (and the gradient) of its stage are kept."""

    compute: int
    weight: int

"""The data types of a strategy: a work item, and the two workers assigned to it."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from titanlite.errors import TitanliteError


class SimulationError(TitanliteError):
    """The input of a simulation is invalid, or the simulated ranks deadlock."""


class Direction(IntEnum):
    """The pass of a work item; WEIGHT is the weight-gradient part of a split backward."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2


class Work(NamedTuple):
    """One pass of one batch through one stage of the model."""

    stage: int
    batch: int
    direction: Direction

    def __str__(self) -> str:
        if self.direction not in tuple(Direction):
            return repr(self)
        return f"{'fbw'[self.direction]}{self.stage}.{self.batch}"


class ComputeAndWeightWorkers(NamedTuple):
    """The worker that runs a work item, and the one that stores its stage's weights."""

    compute: int
    weight: int


def one_line(error: object) -> str:
    """The text of an exception without line breaks."""
    return " ".join(str(error).split())

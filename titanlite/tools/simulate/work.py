"""The data types of a strategy: a work item, and the two workers assigned to it."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

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


def ask(name: str, function: Callable[..., Any], argument: object, what: str = "") -> Any:
    """The answer of a function that the user gives, called `name`, for an argument, called `what`.

    Raises SimulationError, which names both, for whatever it raises.
    """
    try:
        return function(argument)
    except Exception as error:
        raise SimulationError(
            f"{name} raises {type(error).__name__} for {what or argument}: {one_line(error)}"
        ) from error

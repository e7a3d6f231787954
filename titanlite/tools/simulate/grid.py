"""A grid of ranks with one axis per parallel dimension; the last axis varies fastest."""

from __future__ import annotations

from itertools import product
from math import prod

from titanlite.tools.simulate.work import SimulationError


class Grid:
    """All ranks, arranged along named axes, outermost first: `Grid(pp=2, dp=2, tp=2)`."""

    def __init__(self, **degrees: int) -> None:
        for axis, degree in degrees.items():
            if degree < 1:
                raise SimulationError(f"the degree of {axis} is {degree}; it must be at least 1")
        self.degrees = degrees
        self.num_ranks = prod(degrees.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis."""
        if not 0 <= rank < self.num_ranks:
            raise SimulationError(f"there is no rank {rank}; ranks are 0 to {self.num_ranks - 1}")
        coordinates = {}
        for axis in reversed(self.degrees):
            rank, coordinates[axis] = divmod(rank, self.degrees[axis])
        return {axis: coordinates[axis] for axis in self.degrees}

    def rank(self, **coordinates: int) -> int:
        """The rank at `coordinates`, which has one entry per axis."""
        if coordinates.keys() != self.degrees.keys():
            raise SimulationError(f"give one coordinate for each of {', '.join(self.degrees)}")
        rank = 0
        for axis, degree in self.degrees.items():
            if not 0 <= coordinates[axis] < degree:
                raise SimulationError(
                    f"{axis} is {coordinates[axis]}; it must be between 0 and {degree - 1}"
                )
            rank = rank * degree + coordinates[axis]
        return rank

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that equal `rank` on every axis except `axes`, in order."""
        here = self.coordinates(rank)
        along = [
            range(degree) if axis in axes else (here[axis],)
            for axis, degree in self.degrees.items()
        ]
        return [self.rank(**dict(zip(self.degrees, at, strict=True))) for at in product(*along)]

"""Ranks as points of a grid of parallel dimensions, the last one varying fastest."""

from __future__ import annotations

from math import prod

from titanlite.simulate.work import SimulationError


class Grid:
    """A world of ranks with named axes, outermost first: `Grid(pp=2, dp=2, tp=2)`."""

    def __init__(self, **degrees: int) -> None:
        for axis, degree in degrees.items():
            if degree < 1:
                raise SimulationError(f"the degree of {axis} is {degree}; it must be at least 1")
        self.degrees = degrees
        self.num_ranks = prod(degrees.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` is along each axis."""
        if not 0 <= rank < self.num_ranks:
            raise SimulationError(f"there is no rank {rank}; ranks are 0 to {self.num_ranks - 1}")
        coordinates = {}
        for axis in reversed(self.degrees):
            rank, coordinates[axis] = divmod(rank, self.degrees[axis])
        return {axis: coordinates[axis] for axis in self.degrees}

    def rank(self, **coordinates: int) -> int:
        """The rank at `coordinates`, one for each axis."""
        if coordinates.keys() != self.degrees.keys():
            raise SimulationError(f"coordinates are needed for {', '.join(self.degrees)}")
        rank = 0
        for axis, degree in self.degrees.items():
            if not 0 <= coordinates[axis] < degree:
                raise SimulationError(
                    f"{axis} is {coordinates[axis]}; it goes from 0 to {degree - 1}"
                )
            rank = rank * degree + coordinates[axis]
        return rank

    def group(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` along `axes` at most, in order."""
        here = self.coordinates(rank)
        kept = {axis: at for axis, at in here.items() if axis not in axes}
        return [
            other
            for other in range(self.num_ranks)
            if kept.items() <= self.coordinates(other).items()
        ]

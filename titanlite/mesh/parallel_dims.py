"""How many ranks each mesh axis has, and where a rank stands on them; torch-free.

A job's ranks form a grid with one axis for each kind of parallelism. Ranks are numbered row by
row: the innermost axis (tp), which talks most, has neighbouring ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, outermost first."""


@dataclass(frozen=True)
class ParallelDims:
    """The degree of every mesh axis, each at least 1; their product is the number of ranks."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in self.degrees.items():
            if degree < 1:
                raise ValueError(f"degree of {axis} is {degree}, not at least 1")

    @property
    def degrees(self) -> dict[str, int]:
        """Axis -> degree, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def dp(self) -> int:
        """Number of ranks, or groups of ranks, that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def pp_enabled(self) -> bool:
        return self.pp > 1

    @property
    def dp_enabled(self) -> bool:
        return self.dp > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        return self.dp_replicate > 1

    @property
    def dp_shard_enabled(self) -> bool:
        return self.dp_shard > 1

    @property
    def cp_enabled(self) -> bool:
        return self.cp > 1

    @property
    def tp_enabled(self) -> bool:
        return self.tp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Parameters are sharded over dp_shard and cp together, so either one turns FSDP on."""
        return self.dp_shard * self.cp > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> position of `rank` on it; raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.degrees[axis])
        return {axis: position[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at `coordinates` (axis=position, 0 where left out), inverse of coordinates().

        Raises ValueError for an unknown axis or a position outside its axis.
        """
        unknown = sorted(set(coordinates) - set(AXES))
        if unknown:
            raise ValueError(f"no mesh axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
        rank = 0
        for axis, degree in self.degrees.items():
            position = coordinates.get(axis, 0)
            if not 0 <= position < degree:
                raise ValueError(f"position {position} is outside {axis}, whose degree is {degree}")
            rank = rank * degree + position
        return rank

    def describe_place(self, rank: int) -> str:
        """Where `rank` is on the axes in use, such as "dp_shard 1, tp 0"; "" without any."""
        places = self.coordinates(rank).items()
        return ", ".join(f"{axis} {at}" for axis, at in places if self.degrees[axis] > 1)

    def describe(self) -> str:
        """The axes in use, such as "dp_shard 2 x tp 2"; "one rank" where there is none."""
        used = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        return " x ".join(used) or "one rank"


def divisors(number: int) -> list[int]:
    """Every divisor of `number`, ascending: the degrees that split it evenly."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})

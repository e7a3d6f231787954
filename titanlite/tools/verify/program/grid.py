"""The axes along which the ranks of a comparison are arranged; torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlite.errors import ConfigError

WORLD = "world"
"""The name of the axis if only a number of ranks is given."""


@dataclass(frozen=True)
class RankGrid:
    """Axis -> degree, outermost first; ranks are numbered in row-major order."""

    degrees: dict[str, int]

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def axes_in_use(self) -> tuple[str, ...]:
        """The axes with more than one rank."""
        return tuple(axis for axis, degree in self.degrees.items() if degree > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of `rank`."""
        place = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, place[axis] = divmod(rank, degree)
        return {axis: place[axis] for axis in self.degrees}

    def describe(self) -> str:
        """The axes and their degrees, such as "dp 2 x tp 2"."""
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())


def make_grid(ranks: Any) -> RankGrid:
    """The grid of `ranks`, a number or axis -> degree; raises ConfigError for anything else."""
    degrees = {WORLD: ranks} if isinstance(ranks, int) else ranks
    is_mapping = isinstance(degrees, Mapping) and len(degrees) > 0
    if not is_mapping or not all(isinstance(axis, str) and axis for axis in degrees):
        raise ConfigError(f'ranks: {ranks!r} is no number of ranks; give 4 or {{"dp": 2, "tp": 2}}')
    for axis, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ConfigError(f"ranks: {axis} has {degree!r} ranks; give a positive integer")
    return RankGrid(dict(degrees))

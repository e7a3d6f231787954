"""The axes along which the ranks of a comparison are arranged; torch-free."""

from collections.abc import Mapping
from typing import Any

from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import Grid

WORLD = "world"
"""The name of the axis if only a number of ranks is given."""


def make_grid(ranks: Any) -> Grid:
    """The grid of `ranks`, a number or axis -> degree; raises ConfigError for anything else."""
    degrees = {WORLD: ranks} if isinstance(ranks, int) else ranks
    is_mapping = isinstance(degrees, Mapping) and len(degrees) > 0
    if not is_mapping or not all(isinstance(axis, str) and axis for axis in degrees):
        raise ConfigError(f'ranks: {ranks!r} is no number of ranks; give 4 or {{"dp": 2, "tp": 2}}')
    for axis, degree in degrees.items():
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ConfigError(f"ranks: {axis} has {degree!r} ranks; give a positive integer")
    return Grid(**degrees)

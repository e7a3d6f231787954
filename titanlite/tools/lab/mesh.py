"""Mesh: an N-dimensional grid of devices with named axes. Needs no torch.

A device has a rank (its position in row-major order) and a MeshIndex (its coordinate on each axis).
Devices that differ only along some axes form a group; a collective runs within a group.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titanlite.errors import TitanliteError

# Axes of a mesh, slowest first; None stands for all of them.
Axes = Sequence[str] | None


class MeshError(TitanliteError, ValueError):
    """A mesh, an axis or a rank is invalid."""


@dataclass(frozen=True)
class MeshIndex:
    """The position of a device on its mesh: one coordinate per axis, `index["x"]`."""

    axes: tuple[str, ...]
    coordinates: tuple[int, ...]

    def __getitem__(self, axis: str) -> int:
        return self.coordinates[self.axes.index(axis)]

    def __str__(self) -> str:
        pairs = zip(self.axes, self.coordinates, strict=True)
        return ", ".join(f"{axis}={coordinate}" for axis, coordinate in pairs)


class Mesh:
    """An N-dimensional grid of devices with named axes, outermost first: `Mesh(x=2, y=4)`.

    Raises MeshError if an axis has no devices.
    """

    def __init__(self, **sizes: int) -> None:
        for axis, size in sizes.items():
            if size < 1:
                raise MeshError(f"mesh axis {axis}: the size is {size}; it must be at least 1")
        self.sizes = dict(sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def size(self) -> int:
        return math.prod(self.sizes.values())

    def __iter__(self) -> Iterator[MeshIndex]:
        """All indices in mesh order: row-major, the last axis varies fastest."""
        for coordinates in itertools.product(*map(range, self.sizes.values())):
            yield MeshIndex(self.axes, coordinates)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and list(self.sizes.items()) == list(other.sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"

    def index(self, rank: int) -> MeshIndex:
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is not on {self}, which has {self.size} devices")
        coordinates = []
        for size in reversed(self.sizes.values()):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return MeshIndex(self.axes, tuple(reversed(coordinates)))

    def rank(self, index: MeshIndex) -> int:
        rank = 0
        for axis, size in self.sizes.items():
            rank = rank * size + index[axis]
        return rank

    def degree(self, axes: Sequence[str]) -> int:
        """The product of the sizes of these axes."""
        self.check_axes(axes)
        return math.prod(self.sizes[axis] for axis in axes)

    def group(self, index: MeshIndex, axes: Axes = None) -> tuple[int, ...]:
        """The ranks that differ from `index` only along `axes` (None: all axes).

        The order is row-major over the axes as given. The position of a rank in the group is thus
        the number of its shard of a dimension that is sharded over these axes.
        """
        axes = self.axes if axes is None else tuple(axes)
        self.check_axes(axes)
        ranks = []
        for coordinates in itertools.product(*(range(self.sizes[axis]) for axis in axes)):
            moved = dict(zip(axes, coordinates, strict=True))
            place = tuple(moved.get(axis, index[axis]) for axis in self.axes)
            ranks.append(self.rank(MeshIndex(self.axes, place)))
        return tuple(ranks)

    def check_axes(self, axes: Sequence[str]) -> None:
        """Raise MeshError for an axis that the mesh does not have, or that is listed twice."""
        for axis in axes:
            if axis not in self.sizes:
                raise MeshError(f"{self} has no axis {axis!r}; it has {', '.join(self.axes)}")
        if len(set(axes)) < len(axes):
            raise MeshError(f"axes {', '.join(axes)}: an axis can be used only once")

"""Shardings: for each dimension of a tensor, the mesh axes that shard it.

A dimension sharded over axes (x, y) is split into size(x) * size(y) equal parts; x varies slowest.
A tensor is replicated along every axis that shards none of its dimensions. Everything here is
computed on the host, before any device runs.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from titanlite.errors import TitanliteError
from titanlite.tools.lab.mesh import Mesh, MeshIndex

Shape = Sequence[int]


class ShardingError(TitanliteError, ValueError):
    """A sharding is invalid, or does not match a tensor or a mesh."""


@dataclass(frozen=True)
class DimSharding:
    """The mesh axes that shard one dimension, slowest first; empty if it is not sharded."""

    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "".join(self.axes) or "_"


@dataclass(frozen=True, init=False, repr=False)
class TensorSharding:
    """The sharding of each dimension of a tensor: `TensorSharding("x", None, ("y", "z"))`.

    One argument per dimension: an axis, several axes, or None. `str()` gives "[x, _, yz]". Raises
    ShardingError if an axis shards two dimensions: some parts would then be on no device.
    """

    dims: tuple[DimSharding, ...]

    def __init__(self, *dims: str | Sequence[str] | DimSharding | None) -> None:
        object.__setattr__(self, "dims", tuple(_dim_sharding(dim) for dim in dims))
        for axis in self.axes:
            if self.axes.count(axis) > 1:
                raise ShardingError(f"sharding {self}: axis {axis} is used more than once")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(dim.axes for dim in self.dims))

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is replicated on all devices."""
        return not self.axes

    def __getitem__(self, dim: int) -> tuple[str, ...]:
        """The axes that shard dimension `dim`."""
        return self.dims[dim].axes

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]"

    __repr__ = __str__

    def transposed(self) -> "TensorSharding":
        first, second = self.dims
        return TensorSharding(second, first)

    def check(self, mesh: Mesh, shape: Shape, name: str = "tensor") -> None:
        """Raise ShardingError unless a tensor of this shape can be sharded like this on `mesh`."""
        if len(shape) != len(self.dims):
            raise ShardingError(
                f"{name} of shape {tuple(shape)} has {len(shape)} dimensions; "
                f"its sharding {self} has {len(self.dims)}"
            )
        for number, (size, dim) in enumerate(zip(shape, self.dims, strict=True)):
            unknown = [axis for axis in dim.axes if axis not in mesh.sizes]
            if unknown:
                raise ShardingError(
                    f"{name}: the sharding {self} uses axis {unknown[0]}, which is not in {mesh}"
                )
            degree = mesh.degree(dim.axes)
            if size % degree:
                raise ShardingError(
                    f"{name}: dimension {number} of size {size} does not divide into {degree} "
                    f"equal parts over {' and '.join(dim.axes)} of {mesh}"
                )

    def local_shape(self, mesh: Mesh, shape: Shape) -> tuple[int, ...]:
        """The shape of each device's shard."""
        return tuple(
            size // mesh.degree(dim.axes) for size, dim in zip(shape, self.dims, strict=True)
        )

    def whole_shape(self, mesh: Mesh, local_shape: Shape) -> tuple[int, ...]:
        """The shape of the whole tensor whose shards have shape `local_shape`."""
        return tuple(
            size * mesh.degree(dim.axes) for size, dim in zip(local_shape, self.dims, strict=True)
        )

    def box(self, mesh: Mesh, shape: Shape, index: MeshIndex) -> tuple[tuple[int, int], ...]:
        """The part of the tensor that a device holds: (first, last + 1) per dimension."""
        bounds = []
        for length, dim in zip(self.local_shape(mesh, shape), self.dims, strict=True):
            part = 0
            for axis in dim.axes:
                part = part * mesh.sizes[axis] + index[axis]
            bounds.append((part * length, (part + 1) * length))
        return tuple(bounds)

    def split(self, mesh: Mesh, tensor: torch.Tensor, name: str = "tensor") -> list[torch.Tensor]:
        """Every device's shard, in mesh order. Raises like `check`."""
        self.check(mesh, tensor.shape, name)
        return [at(tensor, self.box(mesh, tensor.shape, index)) for index in mesh]

    def join(self, mesh: Mesh, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from every device's shard, in mesh order."""
        first = shards[0]
        shape = self.whole_shape(mesh, first.shape)
        whole = torch.empty(shape, dtype=first.dtype, device=first.device)
        for index, shard in zip(mesh, shards, strict=True):
            at(whole, self.box(mesh, shape, index)).copy_(shard)
        return whole


def whole(num_dims: int) -> TensorSharding:
    """The sharding of a replicated tensor with `num_dims` dimensions."""
    return TensorSharding(*[None] * num_dims)


def at(tensor: torch.Tensor, box: Iterable[tuple[int, int]]) -> torch.Tensor:
    """A view of the part of a tensor inside a box."""
    return tensor[tuple(slice(first, last) for first, last in box)]


def _dim_sharding(dim: str | Sequence[str] | DimSharding | None) -> DimSharding:
    if isinstance(dim, DimSharding):
        return dim
    if dim is None:
        return DimSharding()
    return DimSharding((dim,) if isinstance(dim, str) else tuple(dim))

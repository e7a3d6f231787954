"""The tensors of a rank by name, and conversion between whole tensors and shards."""

from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard

from titanlite.errors import TitanliteError
from titanlite.modules.names import unwrapped_name


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers for an FSDPModule; torch 2.11 has at most one."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def parameters_of(parts: Iterable[nn.Module], tied: Mapping[str, str]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's parts of a model, or its shards of them, by canonical name.

    A tied weight has its first name, which `tied` gives by further name. If several parts have
    copies of a parameter, the first is here. Raises TitanliteError if two parameters of a part have
    one name.
    """
    found: dict[str, nn.Parameter] = {}
    for part in parts:
        of_part = _named(part, part.named_parameters(), "parameters")
        for name, parameter in of_part.items():
            found.setdefault(tied.get(name, name), parameter)
    return found


def buffers_of(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """The persistent buffers of this rank's parts of a model, by canonical name.

    If several parts have a buffer, the first is here. Raises TitanliteError if two of a part have
    one name.
    """
    found: dict[str, Tensor] = {}
    for part in parts:
        persistent = (
            (f"{prefix}.{name}" if prefix else name, buffer)
            for prefix, module in part.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        )
        found = {**_named(part, persistent, "buffers"), **found}
    return found


T = TypeVar("T", bound=Tensor)


def _named(part: nn.Module, tensors: Iterable[tuple[str, T]], kind: str) -> dict[str, T]:
    found: dict[str, T] = {}
    for raw, tensor in tensors:
        name = unwrapped_name(part, raw)
        if found.setdefault(name, tensor) is not tensor:
            raise TitanliteError(
                f"{raw}: two {kind} of {type(part).__name__} have the name {name} in checkpoints, "
                "since titanlite leaves out the names of the wrappers that it and torch insert; "
                "rename one of them"
            )
    return found


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shard_of(full: Tensor, like: Tensor, dims: Container[int] | None = None) -> Tensor:
    """This rank's shard of `full`, sharded like `like`, a DTensor or plain tensor of its shape.

    Without communication, and copied if the shard is not one piece. If FSDP2 shards a dimension
    that TP has already sharded, the outer mesh axis cuts last (its placement is strided), so
    strided axes are applied after the others. With `dims`, only these dimensions are cut.
    """
    if not isinstance(like, DTensor):
        return full
    mesh, coordinate = like.device_mesh, like.device_mesh.get_coordinate()
    assert coordinate is not None
    part = full
    for axis in _cutting_order(like):
        placement = like.placements[axis]
        if is_sharded(placement):
            assert isinstance(placement, Shard | _StridedShard)
            if dims is not None and placement.dim not in dims:
                continue
            index, size = coordinate[axis], mesh.size(axis)
            groups = _num_groups(like, axis)
            chunks = part.chunk(size * groups, dim=placement.dim)
            if groups > 1:
                part = torch.cat(chunks[index::size], dim=placement.dim)
            else:
                part = chunks[index] if index < len(chunks) else part.narrow(placement.dim, 0, 0)
    return part


def offsets_of(tensor: Tensor) -> tuple[int, ...]:
    """The offset of this rank's shard in the whole tensor, along each dimension.

    DTensor's own function gives other offsets if strided shards do not divide evenly.
    """
    return tuple(_place(tensor)[0])


def _place(tensor: Tensor, without: int = -1) -> tuple[list[int], list[int]]:
    """The offset and the shape of this rank's shard, as if the axis `without` cut nothing."""
    offsets, sizes = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis in _cutting_order(tensor):
            placement = tensor.placements[axis]
            if axis != without and is_sharded(placement):
                assert isinstance(placement, Shard | _StridedShard)
                cut = _chunks(sizes[placement.dim], mesh.size(axis))
                offsets[placement.dim] += sum(cut[: coordinate[axis]])
                sizes[placement.dim] = cut[coordinate[axis]]
    return offsets, sizes


def is_sharded(placement: Placement) -> bool:
    """Whether a placement shards a dimension, including FSDP2's strided shards of TP shards.

    `Placement.is_shard()` is false for strided shards.
    """
    return isinstance(placement, Shard | _StridedShard)


def last_cuts(tensor: Tensor, dims: Container[int]) -> dict[int, int]:
    """The mesh axes that are the last to cut one of `dims`, with their sizes."""
    last = {}
    if isinstance(tensor, DTensor):
        for axis in _cutting_order(tensor):
            dim, size = getattr(tensor.placements[axis], "dim", -1), tensor.device_mesh.size(axis)
            if dim in dims and size > 1:
                last[dim] = axis, size
    return dict(last.values())


def shard_shapes(tensor: DTensor, axis: int) -> tuple[int, list[list[int]]]:
    """The dimension that `axis`, one of last_cuts, cuts, and the shape of each shard along it."""
    dim = tensor.placements[axis].dim  # type: ignore[attr-defined]
    _, sizes = _place(tensor, without=axis)
    rows = _chunks(sizes[dim], tensor.device_mesh.size(axis))
    return dim, [[*sizes[:dim], size, *sizes[dim + 1 :]] for size in rows]


def _chunks(size: int, parts: int) -> list[int]:
    """The sizes of torch.chunk, with zeros for what is left."""
    most = -(-size // parts)
    return [max(0, min(most, size - index * most)) for index in range(parts)]


def whole_tensor(tensor: Tensor, dims: Container[int] | None = None) -> Tensor:
    """Gather a DTensor, or return a plain tensor itself; every rank of its mesh must call this.

    With `dims`, only these dimensions are gathered.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements = list(tensor.placements)
    # One axis at a time, the last cut first: the other order sends more, and torch warns about it.
    for axis in reversed(_cutting_order(tensor)):
        is_kept = dims is not None and getattr(placements[axis], "dim", -1) not in dims
        if not placements[axis].is_replicate() and not is_kept:
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _num_groups(tensor: DTensor, axis: int) -> int:
    """In how many groups, such as q, k and v, a strided axis cuts a dimension; 1 for others.

    FSDP2's have as many as inner axes cut the dimension into, and cut the rank's one of these.
    """
    placement, mesh = tensor.placements[axis], tensor.device_mesh
    if not isinstance(placement, _StridedShard):
        return 1
    inner = 1
    for other in range(axis + 1, mesh.ndim):
        own = tensor.placements[other]
        if isinstance(own, Shard | _StridedShard) and own.dim == placement.dim:
            inner *= mesh.size(other)
    groups = int(placement.split_factor)
    return 1 if groups == inner else groups


def _cutting_order(tensor: DTensor) -> list[int]:
    """The mesh axes in the order in which they cut: strided ones last."""
    return sorted(
        range(tensor.device_mesh.ndim),
        key=lambda axis: isinstance(tensor.placements[axis], _StridedShard),
    )


class ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()

"""The norm of all gradients of a job, and clipping by that norm, under any plan.

Each gradient element counts once, even if it is replicated: a rank counts its shard of a parameter
only if it is rank 0 on every axis over which the parameter is replicated. One all-reduce over the
world then covers every mesh and every pipeline stage.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from titanlite.mesh.parallel_dims import axes_of, axes_where
from titanlite.modules.shards import is_sharded, local_part


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Reduce all Partial gradients, with one all-reduce for each mesh axis and dtype.

    A weight that is replicated over the tensor axis and used on sharded activations has a Partial
    gradient in DTensor. FSDP2 reduces it; plain tensor parallelism does not. A plain parameter that
    was used with DTensors may have a DTensor as gradient, and gets the plain tensor.
    """
    pending: dict[tuple[DeviceMesh, int, torch.dtype], list[tuple[nn.Parameter, Tensor]]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if not isinstance(grad, DTensor):
            continue
        if not isinstance(parameter, DTensor):
            parameter.grad = grad.full_tensor()
            continue
        pairs = zip(grad.placements, parameter.placements, strict=True)
        differing = {axis: pair for axis, pair in enumerate(pairs) if pair[0] != pair[1]}
        if len(differing) == 1:
            ((axis, (now, wanted)),) = differing.items()
            if now == Partial() and wanted == Replicate():
                key = grad.device_mesh, axis, grad.dtype
                pending.setdefault(key, []).append((parameter, grad.to_local()))
                continue
        if differing:
            parameter.grad = grad.redistribute(placements=parameter.placements)
    for (mesh, axis, _), gradients in pending.items():
        joined = torch.cat([local.flatten() for _, local in gradients])
        dist.all_reduce(joined, group=mesh.get_group(axis))
        parts = joined.split([local.numel() for _, local in gradients])
        for (parameter, local), part in zip(gradients, parts, strict=True):
            parameter.grad = _like(parameter, part.view_as(local))


def _like(parameter: Any, local: Tensor) -> DTensor:
    """A DTensor with the placements of `parameter` and the local tensor `local`."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], world_mesh: DeviceMesh) -> Tensor:
    """The 2-norm of all gradients of the job, as a scalar that is the same on every rank."""
    squares = own_squares(parameters, world_mesh)
    dist.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def own_squares(parameters: Iterable[nn.Parameter], world_mesh: DeviceMesh) -> Tensor:
    """This rank's part of the squared norm of all gradients, a float64 scalar.

    `parameters` are those of this rank's part of the model; `world_mesh` is the mesh of all ranks,
    with named axes. Low-precision gradients are squared and summed in float32.
    """
    counted = [
        local_part(parameter.grad)
        for parameter in parameters
        if parameter.grad is not None and _is_counted_here(parameter, world_mesh)
    ]
    device = torch.device(world_mesh.device_type)
    dtype = torch.float32
    squares = torch.zeros((), dtype=dtype, device=device)
    if counted:
        dtype = torch.promote_types(dtype, counted[0].dtype)
        norms = torch._foreach_norm(counted, 2, dtype=dtype)
        squares = torch.stack(norms).square().sum().to(device, non_blocking=True)
    # Always float64, since ranks that count nothing do not know the dtype of the others.
    return squares.double()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients, whose norm is `norm`, so that their norm is at most `max_norm`."""
    gradients = [
        local_part(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        scale = scale.to(gradients[0].device, gradients[0].dtype)
        torch._foreach_mul_(gradients, scale)


def _is_counted_here(parameter: nn.Parameter, world_mesh: DeviceMesh) -> bool:
    """Whether this rank has coordinate 0 on every axis over which `parameter` is replicated."""
    sharded_axes = set(axes_where(weights="stages"))
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for axis, placement in zip(names, parameter.placements, strict=True):
            if is_sharded(placement):
                sharded_axes |= set(axes_of(axis))
    coordinate = world_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        position == 0
        for axis, position in zip(world_mesh.mesh_dim_names or (), coordinate, strict=True)
        if axis not in sharded_axes
    )

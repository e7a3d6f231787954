"""On a rank: compares its shards of tensors with the same shards of the reference's tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Optimizer

from titanlite.job import Job
from titanlite.mesh.parallel_dims import AXES, axes_where
from titanlite.modules.names import canonical_name
from titanlite.modules.shards import is_sharded, local_part, shard_of
from titanlite.tools.verify.record import Agreement


def agreements(
    parameters: Mapping[str, nn.Parameter],
    reference: Mapping[str, Tensor],
    tensor_of: Callable[[nn.Parameter], Tensor | None],
) -> dict[str, Agreement]:
    found = {}
    for name, parameter in parameters.items():
        tensor = tensor_of(parameter)
        if tensor is not None and name in reference:
            whole = reference[name]
            found[name] = agreement(local_part(tensor).detach(), same_part(whole, parameter), whole)
        elif tensor is not None or name in reference:
            found[name] = Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
    return found


def state_agreements(job: Job, record: Any) -> dict[str, Agreement]:
    """The optimizer state compared with the reference's; missing entries count as differing."""
    parameters = job.parameters
    own, known = state_of(job.trainer.optimizer, parameters), record["state"]
    found = {
        name: agreement_of(tensor, like, known.get(name)) for name, (tensor, like) in own.items()
    }
    names = tuple(f"{name}." for name in parameters)
    for name in known.keys() - own.keys():
        if name.startswith(names):
            found[name] = Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
    return found


def agreement_of(tensor: Tensor, like: Tensor, known: Tensor | None) -> Agreement:
    """This rank's part of a tensor compared with the reference's; `like` has its placements."""
    if known is None:
        return Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
    return agreement(local_part(tensor).detach(), same_part(known, like), known)


def optimizer_state(job: Job) -> dict[str, tuple[Tensor, Tensor]]:
    """The optimizer state: "name.key" -> (tensor, a tensor with its placements)."""
    return state_of(job.trainer.optimizer, job.parameters)


def state_of(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The state of an optimizer: "name.key" -> (tensor, a tensor with its placements)."""
    return {
        f"{name}.{key}": (value, parameter if value.shape == parameter.shape else value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def all_buffers(job: Job) -> dict[str, Tensor]:
    """All buffers of this rank's parts of the model, non-persistent ones too."""
    return {
        canonical_name(name): buffer for part in job.parts for name, buffer in part.named_buffers()
    }


def same_part(whole: Tensor, parameter: Tensor) -> Tensor:
    return shard_of(whole, parameter) if whole.shape == parameter.shape else whole


def agreement(own: Tensor, expected: Tensor, whole: Tensor) -> Agreement:
    """`own`, a rank's part, compared with `expected`, the same part of the reference's `whole`."""
    digest = digest_of(own)
    if whole.is_complex():
        own, expected, whole = (torch.view_as_real(tensor) for tensor in (own, expected, whole))
    scale = whole.double().abs().max().item() if whole.numel() else 0.0
    if own.shape != expected.shape:
        return Agreement(math.inf, scale, 0.0, 0.0, 0.0, digest)
    a, b = own.cpu().double().flatten(), expected.double().flatten()
    error = (a - b).abs().max().item() if a.numel() else 0.0
    if math.isnan(error):
        error = math.inf
    return Agreement(error, scale, (a @ a).item(), (a @ b).item(), (b @ b).item(), digest)


def digest_of(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=8).hexdigest()


def is_pending(grad: Tensor | None) -> bool:
    return isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements)


def _axes_of(mesh_dim_name: str) -> list[str]:
    """The axes in a mesh dimension's name, computed apart from `axes_of`, which may be wrong."""
    if mesh_dim_name in ("ep", "efsdp"):
        return ["dp_shard", "cp", "tp"]
    return [axis for axis in AXES if f"_{axis}_" in f"_{mesh_dim_name}_"]


def placements_of(job: Job, parameter: Tensor) -> dict[str, str]:
    """Mesh axis -> "replicated", "sharded" or "strided", for axes with more than one rank."""
    stages = axes_where(weights="stages")
    used = {axis: "replicated" for axis in job.dims.axes_in_use if axis not in stages}
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if is_sharded(placement):
                kind = "strided" if isinstance(placement, _StridedShard) else "sharded"
                for axis in _axes_of(name):
                    if axis in used:
                        used[axis] = kind
    return used

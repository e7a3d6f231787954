"""On a rank: compares its shards of tensors with the same shards of the reference's tensors."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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

MISSING = Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "")
"""Of a tensor that only the rank or only the reference has."""


Cut = Callable[[Tensor], Tensor]


@dataclass
class HeldPart:
    """A parameter of this rank, and the part of the reference's tensor that it should equal."""

    shape: torch.Size
    """Of the reference's tensor."""
    parameter: nn.Parameter
    cut: Cut = lambda whole: whole
    """A slice of the reference's tensor; a DTensor's own placements cut further."""

    def part_of(self, whole: Tensor, like: Tensor | None = None) -> Tensor:
        """This rank's part of `whole`; `like` is a DTensor with other placements."""
        like = like if isinstance(like, DTensor) else self.parameter
        return same_part(self.cut(whole), like)

    @functools.cached_property
    def place(self) -> str:
        """A digest of the elements that this rank holds: equal for replicas."""
        numbers = torch.arange(self.shape.numel()).view(self.shape)
        part = self.part_of(numbers)
        return f"{list(part.shape)} {digest_of(part)}"


HeldParts = Mapping[str, HeldPart]
"""By the reference's name of the parameter."""


def parts_of_job(job: Job) -> dict[str, HeldPart]:
    """The parameters of a job, whose shards are DTensors."""
    return {name: HeldPart(own.shape, own) for name, own in job.parameters.items()}


def weight_agreements(held: HeldParts, known: Mapping[str, Tensor]) -> dict[str, Agreement]:
    return _agreements(held, {name: one.parameter for name, one in held.items()}, known)


def gradient_agreements(
    held: HeldParts, known: Mapping[str, Tensor], *, zero_is_none: bool = False
) -> dict[str, Agreement]:
    """The gradients compared with the reference's; one that only one side has counts as differing.

    With `zero_is_none`, a gradient of zeros equals one that is missing.
    """
    own = {n: one.parameter.grad for n, one in held.items() if one.parameter.grad is not None}
    if zero_is_none:
        own, known = (
            {n: g for n, g in some.items() if n in others or local_part(g).any()}
            for some, others in ((own, known), (known, own))
        )
    return _agreements(held, own, known)


def _agreements(
    held: HeldParts, own: Mapping[str, Tensor], known: Mapping[str, Tensor]
) -> dict[str, Agreement]:
    found = {}
    for name, one in held.items():
        tensor, whole = own.get(name), known.get(name)
        if tensor is not None and whole is not None:
            found[name] = agreement(_copy(tensor), one.part_of(whole, tensor), whole)
        elif tensor is not None:
            found[name] = MISSING._replace(digest=digest_of(_copy(tensor)))
        elif whole is not None:
            found[name] = MISSING
    return found


def state_agreements(
    optimizer: Optimizer,
    held: HeldParts,
    known: Mapping[str, Tensor],
    *,
    of_both_only: bool = False,
) -> dict[str, Agreement]:
    """The optimizer state compared with the reference's, by "parameter.key".

    Missing entries count as differing, except with `of_both_only`.
    """
    found = {}
    own = state_of(optimizer, {name: one.parameter for name, one in held.items()})
    for entry, tensor in own.items():
        whole, one = known.get(entry), held[entry.rpartition(".")[0]]
        if whole is not None:
            is_alike = whole.ndim > 0 and whole.shape == one.shape
            part = one.part_of(whole) if is_alike else same_part(whole, tensor)
            found[entry] = agreement(_copy(tensor), part, whole)
        elif not of_both_only:
            found[entry] = MISSING
    names = () if of_both_only else tuple(f"{name}." for name in held)
    missing = [entry for entry in known if entry not in own and entry.startswith(names)]
    return found | dict.fromkeys(missing, MISSING)


def buffer_agreements(
    buffers: Mapping[str, Tensor], known: Mapping[str, Tensor], *, of_both_only: bool = False
) -> dict[str, Agreement]:
    """The buffers compared with the reference's; `of_both_only` as for the state."""
    found = {}
    for name, buffer in buffers.items():
        whole = known.get(name)
        if whole is not None and not (of_both_only and whole.shape != buffer.shape):
            found[name] = agreement(_copy(buffer), same_part(whole, buffer), whole)
        elif not of_both_only:
            found[name] = MISSING
    return found


def state_of(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state, by "parameter.key"."""
    return {
        f"{name}.{key}": value
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


def _copy(tensor: Tensor) -> Tensor:
    """This rank's part. FSDP1 frees storage, which it cannot once numpy has seen it."""
    return local_part(tensor.detach()).clone()


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

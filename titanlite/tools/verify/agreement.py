"""On a rank: compares its shards of tensors with the same shards of the reference's tensors."""

from __future__ import annotations

import hashlib
import itertools
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from titanlite.job import Job
from titanlite.mesh.parallel_dims import AXES, axes_where
from titanlite.modules.shards import is_sharded, local_part
from titanlite.tools.verify.record import Agreement
from titanlite.tools.verify.wording import listed

# No more parts of a tensor are named.
MOST_RUNS = 8

MISSING = Agreement(math.inf, 1.0, 0.0, 0.0, 0.0, "", math.inf)
"""Of a tensor that only the rank or only the reference has."""


def agreement(
    own: Tensor, expected: Tensor, whole: Tensor, is_noise: Tensor | None = None
) -> Agreement:
    """`own`, a rank's part, compared with `expected`, the same part of the reference's `whole`."""
    own, expected, whole = dense(own), dense(expected), dense(whole)
    digest = digest_of(own)
    if whole.is_complex():
        own, expected, whole = (torch.view_as_real(tensor) for tensor in (own, expected, whole))
    every = whole.double().flatten()
    scale = every.abs().max().item() if whole.numel() else 0.0
    if own.shape != expected.shape:
        return Agreement(math.inf, scale, 0.0, 0.0, 0.0, digest, math.inf)
    a, b = own.cpu().double().flatten(), expected.double().flatten()
    noise, sums = 0.0, ((a @ a).item(), (a @ b).item(), (b @ b).item())
    if is_noise is not None and is_noise.shape == own.shape:
        is_small = is_noise.flatten() & a.isfinite()
        noise = (a - b).abs().where(is_small, 0.0).max().item() if a.numel() else 0.0
        a = b.where(is_small, a)
    error = (a - b).abs().max().item() if a.numel() else 0.0
    if scale == math.inf and not every.isnan().any():
        # A mask may have infinities: equal ones agree.
        scale = every[every.isfinite()].abs().max().item() if every.isfinite().any() else 0.0
        error = (a - b).where(a != b, 0.0).abs().max().item() if a.numel() else 0.0
    if math.isnan(error):
        error = math.inf
    distance = 0.0
    if error:
        difference, size = a - b, (every @ every).item() / len(every)
        square = (difference @ difference).item() / len(a)
        distance = math.sqrt(square / size) if size else math.inf
    return Agreement(error, scale, *sums, digest, distance, noise)


def without_padding(own: Tensor, part: Tensor) -> Tensor:
    """What is left of a tensor without its padding, the elements beyond the shape of `part`."""
    if own.ndim != part.ndim or own.shape == part.shape:
        return own
    return own[tuple(slice(size) for size in part.shape)]


def wrong_places(own: Tensor, part: Tensor, most: float) -> str:
    """Where two tensors differ by more than `most`, if that is a part of one dimension; or ""."""
    if own.shape != part.shape or not own.numel():
        return ""
    is_wrong = (own.cpu().double() - part.double()).abs() > most
    for dim, size in enumerate(own.shape):
        found = is_wrong.movedim(dim, 0).reshape(size, -1).any(1).nonzero().flatten().tolist()
        if found and len(found) <= size // 2 and found[-1] - found[0] == len(found) - 1:
            last = f" to {found[-1]}" * (len(found) > 1)
            return f"at {found[0]}{last} of {size} along dimension {dim}"
    return ""


def scales_along(own: Tensor, part: Tensor) -> str:
    """How many times as large a tensor is in runs along one dimension, if that is all; or ""."""
    is_known = own.shape == part.shape and not own.is_complex()
    for dim, size in enumerate(own.shape if is_known else ()):
        a, b = (t.double().movedim(dim, 0).reshape(size, -1) for t in (own, part))
        squares = (b * b).sum(1)
        scales = ((a * b).sum(1) / squares)[squares > 0]
        left = a[squares > 0] - scales[:, None] * b[squares > 0]
        places = zip(squares.nonzero().flatten().tolist(), scales.tolist(), strict=True)
        runs = [
            [(place, scale) for place, scale in run]
            for _, run in itertools.groupby(places, lambda one: round(one[1], 4))
        ]
        if 1 < len(runs) <= min(MOST_RUNS, size - 1) and left.norm() < 1e-6 * a.norm():
            ends = [(run[0][0], run[-1][0], run[0][1]) for run in runs]
            shown = [f"{scale:.4g} times (at {first} to {last})" for first, last, scale in ends]
            return f"{listed(shown, MOST_RUNS)}, of {size} along dimension {dim},"
    return ""


def dense(tensor: Tensor) -> Tensor:
    """The tensor with all its zeros; a sparse layout has neither bytes nor views."""
    return tensor.to_dense() if tensor.is_sparse else tensor


def values_of(tensor: Tensor) -> Tensor:
    """The elements that this rank has of a tensor, in one that has no gradient: the local part of a
    DTensor, the values of a jagged tensor.
    """
    own = local_part(tensor.detach()).detach()
    return own.values() if own.is_nested else own


def in_transform() -> bool:
    """Whether a transform of torch.func is running: tensors are then those of one sample, or stand
    for others, and have no memory.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def digest_of(tensor: Tensor) -> str:
    flat = dense(tensor.detach()).cpu().contiguous().reshape(-1)
    if flat.stride(0) != 1:
        # One element may have any stride.
        flat = flat.clone(memory_format=torch.contiguous_format)
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=8).hexdigest()


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

"""A run checks itself: the copies of a tensor that must be equal are compared, bit by bit.

Ranks along an axis over which a tensor is replicated hold copies of it, and so do pipeline stages
that share a parameter. The account of tensors (tensor_account.py) says which. If copies drift
apart, the run trains several models at once and saves parts of each; the loss shows nothing.

Each rank computes a fingerprint of each tensor. One small all-reduce for each axis compares them;
more is sent only if some differ. On GPUs, equal computations may round differently, so there copies
are compared within rounding, and a difference is a warning, unless debug.deterministic is set.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.errors import TitanliteError, number_ranks
from titanlite.job import Job
from titanlite.modules.shards import local_part
from titanlite.parallelize.tensor_account import BUFFER, WHOLE, TensorAccount
from titanlite.ranks.peers import Peers

# Elements of a tensor whose fingerprint is computed at once, which takes 16 bytes for each.
CHUNK = 1 << 20
MISSING = torch.iinfo(torch.int64).min
# The largest difference of copies that rounding explains, relative to a tensor's norm.
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
COARSE = 5e-2

STATE = "the optimizer state of "


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies along an axis differ: each rank and the fingerprint of its copy."""

    name: str
    axis: str
    copies: tuple[tuple[int, Any], ...]


@torch.no_grad()
def check_copies(job: Job, when: str) -> str:
    """Compare all copies that must be equal; every rank must call this.

    Returns a warning, or "". Raises TitanliteError, the same on every rank, if copies differ. On
    GPUs without debug.deterministic it returns the text of that error as a warning instead. `when`
    says in the text when this was, such as "after step 1". Does nothing if debug.check_copies is
    false, or in a world of one rank.
    """
    if job.world.size == 1 or not job.config.debug.check_copies:
        return ""
    is_exact = job.world.device.type == "cpu" or job.config.debug.deterministic
    prints = _fingerprints(job, is_exact)
    differing = [
        (axis, names)
        for axis in job.dims.axes_in_use
        if (names := _compare(job, axis, prints, is_exact))
    ]
    flag = torch.tensor(bool(differing), dtype=torch.int, device=job.world.device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not flag:
        return ""
    found = _everyones(job, differing, prints)
    text = _explain(job, found, when, is_exact)
    if is_exact:
        raise TitanliteError(text)
    return text


def _names(job: Job, axis: str) -> list[str]:
    """The tensors compared along `axis`, on each of its ranks; along pp all that stages share."""
    own = {*job.parameters, *job.buffers}
    names = []
    for name, account in job.tensors.items():
        if axis in account.copied_over and (axis == "pp" or name in own):
            names += [name, f"{STATE}{name}"] if account.kind != BUFFER else [name]
    return names


def _fingerprints(job: Job, is_exact: bool) -> dict[str, Tensor]:
    """The fingerprint of each tensor of this rank; a parameter's optimizer state has one."""
    compute = _bits if is_exact else _norms
    wanted = {name for axis in job.dims.axes_in_use for name in _names(job, axis)}
    state = job.trainer.optimizer.state
    found = {}
    for name, parameter in job.parameters.items():
        if name in wanted:
            found[name] = compute([parameter])
            of_state = state.get(parameter, {})
            values = [of_state[key] for key in sorted(of_state)]
            found[f"{STATE}{name}"] = compute([v for v in values if isinstance(v, Tensor)])
    found |= {name: compute([b]) for name, b in job.buffers.items() if name in wanted}
    return {name: value.to(job.world.device) for name, value in found.items()}


def _bits(tensors: Sequence[Tensor]) -> Tensor:
    """A 64-bit fingerprint that changes with any single bit: int64 [1].

    A sum of the elements' bits, each multiplied by an odd number of its own, modulo 2**64. A
    flipped bit changes it by an odd multiple of a power of two, which is not zero.
    """
    total = torch.zeros(1, dtype=torch.int64)
    start = 0
    for tensor in tensors:
        local = local_part(tensor).detach().as_subclass(Tensor)
        if local.is_complex():
            local = torch.view_as_real(local)
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        words = local.contiguous().view(-1).view(kinds[local.element_size()])
        for chunk in words.split(CHUNK):
            numbers = torch.arange(start, start + chunk.numel(), device=chunk.device)
            factors = numbers * -7046029254386353132 + 0x2545F4914F6CDD1D
            total = total.to(chunk.device) + (chunk.to(torch.int64) * factors).sum()
            start += chunk.numel()
    return total


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm and a sum with changing signs, float64 [2]; both change little with rounding."""
    total = torch.zeros(2, dtype=torch.float64)
    for tensor in tensors:
        local = local_part(tensor).detach().as_subclass(Tensor)
        values = torch.view_as_real(local) if local.is_complex() else local
        flat = values.reshape(-1).double()
        signs = (torch.arange(flat.numel(), device=flat.device) * 0x9E3779B1 >> 16 & 1) * 2 - 1
        total = total.to(flat.device)
        total += torch.stack([flat.square().sum(), (flat * signs).sum()])
    total[0].sqrt_()
    return total


def _compare(job: Job, axis: str, prints: dict[str, Tensor], is_exact: bool) -> list[str]:
    """The tensors whose copies along `axis` are not all equal; a collective over it."""
    names = _names(job, axis)
    if not names:
        return []
    nothing = [MISSING] if is_exact else [float("-inf")] * 2
    dtype = torch.int64 if is_exact else torch.float64
    missing = torch.tensor(nothing, dtype=dtype, device=job.world.device)
    # The maximum of x and of its opposite: the largest and the smallest value in one all-reduce.
    own = torch.stack([prints.get(name, missing) for name in names])
    is_here = torch.tensor([name in prints for name in names], device=own.device)[:, None]
    opposite = torch.where(is_here, ~own if is_exact else -own, own)
    both = torch.stack([own, opposite])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=job.meshes.world[axis].get_group())
    largest, smallest = both[0], ~both[1] if is_exact else -both[1]
    if is_exact:
        differs = largest != smallest
    else:
        of_name = [_tolerance(job, name) for name in names]
        tolerance = torch.tensor(of_name, dtype=dtype, device=own.device)[:, None]
        differs = (largest - smallest).abs() > tolerance * largest[:, :1].abs()
    return [name for name, one in zip(names, differs.any(1).tolist(), strict=True) if one]


def _tolerance(job: Job, name: str) -> float:
    tensors = {**job.parameters, **job.buffers}
    tensor = tensors.get(name.removeprefix(STATE))
    return COARSE if tensor is None else ROUNDING.get(tensor.dtype, COARSE)


def _everyones(
    job: Job, differing: list[tuple[str, list[str]]], prints: dict[str, Tensor]
) -> list[Difference]:
    """The differences that all ranks have found, in the order of the account; collective."""
    own = [
        (axis, name, _place(job, axis), prints[name].tolist())
        for axis, names in differing
        for name in names
        if name in prints
    ]
    copies: dict[tuple[str, str, Any], list[tuple[int, Any]]] = {}
    for rank, of_rank in enumerate(Peers().gathered(own)):
        for axis, name, place, value in of_rank:
            copies.setdefault((name, axis, place), []).append((rank, tuple(value)))
    order = {name: index for index, name in enumerate(job.tensors)}

    def key(item: tuple[tuple[str, str, Any], Any]) -> tuple[bool, int]:
        name = item[0][0]
        return name.startswith(STATE), order.get(name.removeprefix(STATE), 0)

    return [
        Difference(name, axis, tuple(values))
        for (name, axis, _), values in sorted(copies.items(), key=key)
    ]


def _place(job: Job, axis: str) -> tuple[int, ...]:
    """The coordinates of this rank on the other axes: the same for all ranks along `axis`."""
    position = job.dims.coordinates(job.world.rank)
    return tuple(at for name, at in position.items() if name != axis)


def _explain(job: Job, found: Sequence[Difference], when: str, is_exact: bool) -> str:
    first = found[0]
    more = len({one.name for one in found}) - 1
    others = f" (and {more} more tensor{'s' * (more > 1)})" if more else ""
    name = first.name.removeprefix(STATE)
    advice = _advice(job.tensors[name], first.axis)
    what = "copies" if is_exact else "copies, by more than rounding,"
    return (
        f"{first.name}{others}: its {what} along {first.axis} differ {when}: {_who(first)}; "
        f"{advice} (debug.check_copies = false turns this check off)"
    )


def _who(difference: Difference) -> str:
    """The ranks that differ from the majority, or all of them if there is none."""
    counts = Counter(value for _, value in difference.copies)
    usual, number = counts.most_common(1)[0]
    ranks = [rank for rank, _ in difference.copies]
    if 2 * number > len(ranks):
        odd = [rank for rank, value in difference.copies if value != usual]
        rest = [rank for rank, value in difference.copies if value == usual]
        verb = "has another value" if len(odd) == 1 else "have other values"
        return f"{number_ranks(odd)} {verb} than {number_ranks(rest)}"
    return f"{number_ranks(ranks)} have {len(counts)} different values"


def _advice(account: TensorAccount, axis: str) -> str:
    if account.kind == BUFFER:
        return (
            "if each rank may have its own value, name it in local_buffers of the ParallelPlan; "
            "the first rank's is saved"
        )
    if account.completed.get(axis) == WHOLE:
        return (
            "the tensor-parallel plan gives it no style, and its gradient was taken to be whole on "
            "each rank: give its module a style, or name it in partial_gradients of the "
            "ParallelPlan"
        )
    return (
        "the ranks received different values or updates, or one of them has a defect; titanlite "
        "verify finds a wrong gradient"
    )

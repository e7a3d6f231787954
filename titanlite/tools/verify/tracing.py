"""On a rank: compares a step in detail with the reference's, for jobs and for other code.

compare_outputs    which module outputs are wrong?
sum_...            is what is wrong right once it is summed over a mesh axis? A Partial that is
                   never reduced is, over the axis of its ranks. Along that axis all ranks must
                   hold the same part of the tensor.
fit                is a gradient a sum of those of parts of the batch, with wrong coefficients?
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.modules.shards import local_part
from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.outputs import Outputs
from titanlite.tools.verify.record import (
    Agreement,
    Fit,
    ModuleOutput,
    module_of,
    wrong_calls_in_order,
)
from titanlite.tools.verify.subject import Subject

T = TypeVar("T")

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""The largest difference of an output that agrees: far above rounding error, far below a bug."""
# The largest relative residual of an output that is explained.
EXACT = 1e-6


def compare_outputs(
    kept: Outputs,
    known: Mapping[str, Any],
    compare: Callable[[str, list[Tensor], Any], tuple[ModuleOutput, list[Tensor]] | None],
) -> tuple[dict[str, ModuleOutput], dict[str, Tensor]]:
    """The module outputs of a step compared with the reference's, which are `known` by call.

    `compare(call, outputs, known)` compares those of one call, as `compare_calls`, or returns None
    if that cannot be done. Also returns the part that the first output of each call should equal.
    """
    found, expected = {}, {}
    for call, tensors in kept.first.items():
        compared = compare(call, tensors, known[call]) if call in known else None
        if compared is not None:
            found[call], (expected[call], *_) = compared
            found[call].recomputed = kept.recomputed_difference(call)
    return found, expected


def compare_calls(
    calls: Sequence[Tensor],
    ways: Callable[[int, Tensor], Iterable[tuple[Tensor, Tensor]]],
    tolerance: float,
) -> tuple[ModuleOutput, list[Tensor]] | None:
    """A module's outputs, in the order of its calls, compared with parts of the reference's.

    `ways(index, call)` has (a part that this call's output may equal, the whole); the one that fits
    best is taken. Returns these parts, too; None if there is none for a call.
    """
    found: list[Agreement] = []
    parts = []
    for index, call in enumerate(calls):
        fits = [(agreement(call, part, whole), part) for part, whole in ways(index, call)]
        if not fits:
            return None
        best, part = min(fits, key=lambda fit: fit[0].error)
        found.append(best)
        parts.append(part)
    wrong = tuple(i for i, one in enumerate(found) if not one.difference <= tolerance)
    worst = max(found, key=lambda one: one.error)
    aa, ab, bb = (sum(getattr(one, name) for one in found) for name in ("aa", "ab", "bb"))
    total = Agreement(worst.error, worst.scale, aa, ab, bb, "")
    return ModuleOutput(total, len(calls), wrong), parts


def gathered(value: T) -> list[T]:
    """The values of all ranks; every rank of the world must call this, as all functions here."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def sum_over_axes(
    subject: Subject,
    places: Sequence[object],
    tensor: Callable[[], Tensor],
    operator: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> dict[str, Tensor]:
    """Axis -> the sum of a tensor over it, if all ranks along it hold the same part.

    `places` says for each rank of the world which part it holds, None for none.
    """
    found = {}
    for axis, group in subject.groups.items():
        along = {places[rank] for rank in dist.get_process_group_ranks(group)}
        if len(along) == 1 and None not in along:
            total = tensor().to(subject.device).clone()
            dist.all_reduce(total, operator, group=group)
            found[axis] = total.cpu()
    return found


def sum_outputs(
    subject: Subject,
    modules: Iterable[str],
    found: Mapping[str, ModuleOutput],
    own: Mapping[str, list[Tensor]],
    expected: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The first wrong output of the world, in its first call: summed over each axis, and how often
    it and these sums contain the module's bias. Fields of RankTrace.

    `modules` are the reference's in forward order, `own` this rank's outputs by call, `expected`
    their parts of the reference's, and `weights` the weights before the step.
    """
    mine = {call: (bool(o.wrong_calls), tuple(own[call][0].shape)) for call, o in found.items()}
    everyone = gathered(mine)
    is_wrong = [{call: wrong for call, (wrong, _) in of_rank.items()} for of_rank in everyone]
    first = next(iter(wrong_calls_in_order(modules, is_wrong)), None)
    if first is None:
        return {"summed_output": {}}
    bias, biases = weights.get(f"{module_of(first)}.bias"), {}

    def compare(total: Tensor, axis: str = "") -> Agreement:
        part = expected[first]
        has_rows = total.ndim > 1 and total[..., 0].numel() > 1 and total.is_floating_point()
        if has_rows and total.shape == part.shape:
            # The bias may be added after the sum: then the same row is missing everywhere.
            row = (part - total).flatten(0, -2).mean(0)
            if bias is not None and bias.shape == row.shape and bias.any():
                missing = ((row @ bias.to(row)) / (bias @ bias).to(row)).item()
                is_bias = agreement(missing * bias.to(row), row, part).difference < EXACT
                if is_bias and abs(missing) > EXACT:
                    biases[axis] = 1.0 - missing
            total = total + row
        return agreement(total, part, part)

    output = found.get(first)
    if output is not None and output.wrong_calls:
        if compare(own[first][0]).difference < EXACT:
            output.biases = biases.get("")
        biases.clear()
    shapes = [of_rank.get(first, (False, None))[1] for of_rank in everyone]
    sums = {}
    for axis, total in sum_over_axes(subject, shapes, lambda: own[first][0]).items():
        sums[axis] = compare(total, axis)
    return {"summed_output": sums, "summed_biases": biases}


def sum_gradients(
    subject: Subject, names: Iterable[str], known: Mapping[str, Tensor]
) -> dict[str, dict[str, Agreement]]:
    """The gradients `names`, the same on every rank, each summed over each axis."""
    held, names = subject.held, [name for name in names if name in known]
    places = gathered(
        {n: held[n].place for n in names if n in held and held[n].parameter.grad is not None}
    )
    sums = {}
    for name in names:

        def own(name: str = name) -> Tensor:
            gradient = held[name].parameter.grad
            assert gradient is not None
            return local_part(gradient.detach())

        def compare(total: Tensor, name: str = name) -> Agreement:
            whole = known[name]
            return agreement(total, held[name].part_of(whole, held[name].parameter.grad), whole)

        of_ranks = [of_rank.get(name) for of_rank in places]
        totals = sum_over_axes(subject, of_ranks, own)
        sums[name] = {axis: compare(total) for axis, total in totals.items()}
    return sums


def fit(parts: Sequence[Tensor], own: Tensor, known: Tensor) -> Fit | None:
    """`own` as a weighted sum of `parts`, by least squares; the residual is relative to `known`.

    None if it has too few elements for that, or if the parts are not independent.
    """
    own, stacked = own.double().flatten(), torch.stack([p.double().flatten() for p in parts], 1)
    if stacked.size(0) != len(own) or len(own) < 2 * len(parts) or not own.isfinite().all():
        return None
    solved = torch.linalg.lstsq(stacked, own[:, None], rcond=1e-9, driver="gelsd")
    if solved.rank.item() < len(parts):
        return None
    weights = solved.solution[:, 0]
    return tuple(weights.tolist()), residual(parts, weights.tolist(), own, known)


def residual(
    parts: Sequence[Tensor], weights: Sequence[float], own: Tensor, known: Tensor
) -> float:
    """What a weighted sum leaves of `own`, relative to `known`."""
    total = sum(
        weight * part.double().flatten() for weight, part in zip(weights, parts, strict=True)
    )
    scale = known.double().norm().item()
    return (total - own.double().flatten()).norm().item() / scale if scale else math.inf

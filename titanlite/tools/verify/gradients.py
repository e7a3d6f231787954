"""What is wrong with gradients, judged by the ranks' measurements; torch-free.

It tests for three patterns: a common factor, a missing sum over a mesh axis, and parts of the batch
that are summed with wrong coefficients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from titanlite.tools.verify.evidence import (
    EXPLAINED,
    WRONG,
    Evidence,
    JobEvidence,
    holder_of,
    pooled,
)
from titanlite.tools.verify.record import CodeRun
from titanlite.tools.verify.shares import describe_shares
from titanlite.tools.verify.wording import Explained, be, is_near, times


def explain_gradients(e: Evidence) -> Iterator[str]:
    """What is wrong with the gradients, as far as their numbers show it."""
    wrong = e.failed("gradient")
    if not wrong:
        return
    pending = [name for run in e.runs for name in run.pending if name in wrong]
    if pending:
        who = e.named(set(pending))
        yield (
            f"{who} {be(who)} still Partial at the optimizer step: an all-reduce is missing. "
            "Reduce every Partial gradient before the optimizer step"
        )
        return
    yield from explain_absent(e)
    yield from _exchanged(e, wrong)
    by_rank = list(_factors_of_ranks(e, wrong)) or list(_right_copies(e, wrong))
    yield from by_rank
    if not by_rank:
        yield from missing_sums(e, wrong)
    yield from explain_factors(e, wrong)


def explain_absent(e: Evidence) -> Iterator[str]:
    """Gradients that some rank lacks at the optimizer step."""
    wrong = e.failed("gradient")
    parts = [(name, run.steps[e.step].gradients.get(name)) for run in e.runs for name in wrong]
    absent = {name for name, one in parts if one is not None and not one.digest}
    if not absent:
        return
    names = {name for run in e.runs for name in run.placements}
    unsummed = {name for run in e.runs for name in run.unsynchronized}
    why = (
        "Either the backward pass does not reach the parameters, because the forward pass detaches "
        "a tensor, or their wrapper (FSDP, DDP) was told not to reduce them"
    )
    if absent <= unsummed:
        why = (
            "The gradient synchronization of their FSDP2 modules is still off, so these hold them "
            "unreduced. Call set_requires_gradient_sync(True) on each of these modules, or on "
            "the outermost without recurse=False, before the last backward pass of a step"
        )
    elif absent == names:
        why = (
            "The wrapper (FSDP, DDP) was told not to reduce them and still holds them. Enable "
            "its gradient synchronization for the last backward pass of a step"
        )
    yield e.explained(absent, f"missing at the optimizer step. {why}")


def explain_cells(e: JobEvidence) -> Iterator[str]:
    """Gradients that are sums of contributions of ranks or microbatches, wrongly weighted."""
    rest = [name for name in e.failed("gradient") if _factor_of(e, name) is None]
    if rest and e.reference_trace is not None and not list(missing_sums(e, rest)):
        pipeline = e.job.pipeline
        yield from describe_shares(
            e.reference_trace,
            e.traces,
            e.runs,
            rest,
            e.factor,
            1 if pipeline is None else pipeline.schedule.num_microbatches,
        )


def _exchanged(e: Evidence, wrong: list[str]) -> Iterator[str]:
    """Gradients that are those of other parameters, on every rank that holds them."""
    pairs = {}
    for name in wrong:
        holders = {run.rank for run in e.runs if name in run.steps[e.step].gradients}
        others = {t.rank: t.same_as.get(name, "") for t in e.traces if t.rank in holders}
        if len(found := set(others.values())) == 1 and len(others) == len(holders):
            pairs[name] = found.pop()
    yield from describe_exchanged(
        {name: other for name, other in pairs.items() if other}, "gradient"
    )


def describe_exchanged(pairs: Mapping[str, str], what: str) -> Iterator[str]:
    """`pairs` has for each wrong tensor the one whose value it has."""
    if not pairs:
        return
    first, other = next(iter(pairs.items()))
    more = f", and so on for {len(pairs)} {what}s" if len(pairs) > 2 else ""
    if pairs.get(other) == first:
        yield Explained(
            f"{first} and {other} are exchanged: each has the {what} that the other has on one "
            f"process{more}. Look at how tensors are matched with names, or at their order",
            pairs,
        )
    else:
        yield Explained(
            f"the {what} of {first} is that of {other} on one process{more}. Look at how tensors "
            "are matched with names, or at their order",
            pairs,
        )


def _right_copies(e: Evidence, wrong: list[str]) -> Iterator[str]:
    """Gradients of which the copies on some ranks are right, and those on others wrong."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = defaultdict(list)
    for name in wrong:
        parts = {r.rank: p for r in e.runs if (p := r.steps[e.step].gradients.get(name))}
        right = tuple(rank for rank, part in parts.items() if part.difference <= WRONG)
        bad = tuple(rank for rank in parts if rank not in right)
        is_copy = all(
            how == "replicated" for r in bad for how in e.runs[r].placements[name].values()
        )
        if right and bad and is_copy and all(parts[rank].digest for rank in bad):
            found[right, bad].append(name)
    for (right, bad), names in found.items():
        among = (*right, *bad)
        yield e.explained(
            names,
            f"correct {e.where(right, among)}, but wrong {e.where(bad, among)}, although all hold "
            "copies: what completes the gradient there differs, or is missing",
        )


def missing_sums(e: Evidence, wrong: list[str]) -> Iterator[Explained]:
    """Gradients that are correct once summed over an axis."""
    by_axis: dict[tuple[str, str], list[str]] = defaultdict(list)
    zeros: dict[str, list[str]] = defaultdict(list)
    for name in wrong:
        sums = [t.summed_gradients[name] for t in e.traces if name in t.summed_gradients]
        for axis in {axis for of_rank in sums for axis in of_rank}:
            found = [of_rank[axis] for of_rank in sums if axis in of_rank]
            # A sum that cancels out has no factor of its own.
            if all(one.bb**0.5 < WRONG * one.scale and one.difference < WRONG for one in found):
                zeros[axis].append(name)
                continue
            factor, left = pooled(found)
            spread = {round(pooled([one])[0], 6) for one in found}
            if left < EXPLAINED and len(spread) == 1 and not _has_factor(e, name):
                words = "" if is_near(factor, 1.0) else f", divided by {factor:.6g}"
                by_axis[axis, words].append(name)
    for (axis, words), names in by_axis.items():
        names += zeros.pop(axis, [])
        if before := _all_before(e, wrong, names):
            others = e.named(before)
            last = max(names, key=e.parameter_order.__getitem__)
            yield e.explained(
                names,
                f"correct only after a sum over {axis}{words}, and {others}, of earlier modules, "
                f"{be(others)} wrong as a result: the module that reads the output of "
                f"{holder_of(last)} returns a gradient of its input that is still Partial over "
                f"{axis}. All-reduce it over {axis} in that module's backward pass",
                before,
            )
            continue
        if axis == "pp":
            yield e.explained(
                names,
                f"correct only after a sum over the stages that hold a copy of this weight{words}: "
                "each stage has only the gradient of its own use of the weight. Sum the gradients "
                "of the copies before the optimizer step",
            )
            continue
        is_of_plan = axis == "tp" and isinstance(e, JobEvidence)
        named = ", or name it in partial_gradients of the ParallelPlan" if is_of_plan else ""
        yield e.explained(
            names,
            f"correct only after a sum over {axis}{words}: {_own_share(e, axis)}. "
            f"Add the missing all-reduce over {axis}{named}",
        )


def _own_share(e: Evidence, axis: str) -> str:
    """Why ranks along an axis have different shares of a gradient."""
    parts: dict[tuple[tuple[str, int], ...], set[str]] = defaultdict(set)
    for run in e.runs:
        if isinstance(run, CodeRun):
            others = tuple((a, n) for a, n in run.coordinates.items() if a != axis)
            parts[others].add(run.parts[max(1, e.step) - 1])
    if parts and all(len(found) == 1 for found in parts.values()):
        return (
            "all ranks have the same part of the batch, so what the weight reads, or the gradient "
            f"of what it returns, is only the rank's share of a sum over {axis}"
        )
    return "each rank has the gradient of its own part of the batch only"


def _all_before(e: Evidence, wrong: Sequence[str], explained: Sequence[str]) -> list[str]:
    """The other wrong gradients, if all are of earlier modules and nothing else explains them."""
    rest = [name for name in wrong if name not in explained]
    order = e.parameter_order
    if any(name not in order for name in wrong) or any(_has_factor(e, name) for name in rest):
        return []
    first = min(order[name] for name in explained)
    return rest if all(order[name] < first for name in rest) else []


def _factors_of_ranks(e: Evidence, wrong: list[str]) -> Iterator[str]:
    """Gradients that agree on some ranks and are scaled by one factor on the others."""
    found: dict[tuple[tuple[int, ...], float], list[str]] = defaultdict(list)
    for name in wrong:
        if _has_factor(e, name):
            continue
        factors = {}
        for run in e.runs:
            part = run.steps[e.step].gradients.get(name)
            if part is not None and part.bb > 0:
                factor, left = pooled([part])
                if left >= EXPLAINED or factor == 0.0:
                    break
                factors[run.rank] = factor
        else:
            bad = {rank: f for rank, f in factors.items() if not is_near(f, 1.0)}
            factor = next(iter(bad.values()), 1.0)
            if 0 < len(bad) < len(factors) and all(is_near(f, factor) for f in bad.values()):
                found[tuple(bad), round(factor, 6)].append(name)
    for (ranks, factor), names in found.items():
        yield e.explained(
            names,
            f"{times(factor)} as large as on one process, {e.where(ranks)}, but correct on the "
            f"other ranks{e.equals(factor, form='; {}')}. Look for a scaling or a reduction that "
            "differs between ranks",
        )


def _has_factor(e: Evidence, name: str) -> bool:
    return _factor_of(e, name) is not None


def _factor_of(e: Evidence, name: str) -> float | None:
    """The factor between a gradient and the reference's, if it is the same on every rank."""
    parts = [
        run.steps[e.step].gradients[name]
        for run in e.runs
        if name in run.steps[e.step].gradients and run.steps[e.step].gradients[name].bb > 0
    ]
    factor, left = pooled(parts)
    return factor if parts and left < EXPLAINED else None


def explain_factors(e: Evidence, wrong: list[str]) -> Iterator[str]:
    """Gradients that differ from the reference's by a factor, grouped by that factor."""
    groups: dict[float, list[str]] = defaultdict(list)
    zeros = []
    for name in wrong:
        factor = _factor_of(e, name)
        if factor is None or is_near(factor, 1.0):
            continue
        if abs(factor) > 1 / EXPLAINED**2:
            zeros.append(name)
            continue
        known = next((value for value in groups if is_near(factor, value)), factor)
        groups[known].append(name)
    if zeros:
        yield e.explained(
            zeros,
            "zero on one process, but for rounding, and not here: look for what else uses these "
            "parameters, or adds to their gradients",
        )
    for factor, names in sorted(groups.items(), key=lambda item: -len(item[1])):
        same = e.factor(factor, names)
        if factor == 0 or abs(factor) < EXPLAINED:
            yield e.explained(
                names,
                "zero: the backward pass stops before these parameters. Look for a detached tensor "
                "in the forward pass",
            )
        elif same:
            often = "twice" if "the square of" in same else "once"
            verb = (
                f"summed or multiplied by it {often} too often"
                if factor > 1
                else "averaged instead of summed, or divided once too often"
            )
            loss = "" if e.failed("loss") else ". The loss agrees"
            it_is = "it is" if be(e.named(names)) == "is" else "they are"
            yield e.explained(
                names,
                f"{times(factor)} as large as on one process, and {factor:.6g} is {same}: {it_is} "
                f"{verb}{loss}",
            )
        else:
            # Others of the same placement agree, so that this may be a coincidence.
            also = e.factor(factor)
            how = (
                "summed or multiplied by it"
                if factor > 1
                else "averaged over it, or divided by it,"
            )
            hint = f"; {factor:.6g} is also {also}: see whether they are {how} once too often"
            is_shown = "the degree of" in also and "square" not in also
            are = f"{times(factor)} as large as on one process{hint * is_shown}"
            yield e.explained(names, are)

"""Which way of counting gradients explains a wrong gradient norm; torch-free."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from titanlite.tools.verify.differences import holders_of
from titanlite.tools.verify.record import RankRun
from titanlite.tools.verify.wording import how_in_words, is_near, listed

MOST_KINDS = 12


def explain_norm(runs: Sequence[RankRun], step: int, norm: float) -> str:
    """What was counted twice or not at all, if that gives `norm`; else an empty string."""
    if is_near(true_norm(runs, step), norm, 1e-9):
        return ""
    ways = _ways_of_counting(runs, step)
    fitting = [words for words, predicted in ways if is_near(predicted, norm, 1e-9)]
    return "; or ".join(list(dict.fromkeys(fitting))[:2]) or _left_out(runs, step, norm)


def _left_out(runs: Sequence[RankRun], step: int, norm: float) -> str:
    """Which kinds of sharded gradients are counted on the first rank of an axis alone; "" if none.

    A kind has the same name but for numbers, as that of a weight in each layer.
    """
    holders, placed = holders_of(runs), {n: a for run in runs for n, a in run.placements.items()}
    total = true_norm(runs, step) ** 2
    for axis in sorted({axis for axes in placed.values() for axis in axes}):
        of_kind: dict[str, float] = defaultdict(float)
        for name, axes in placed.items():
            if axes.get(axis) in ("sharded", "strided"):
                of_kind[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)] += sum(
                    _local(runs, step, ranks[0], name)
                    for ranks in holders[name].values()
                    if runs[ranks[0]].coordinates[axis] > 0
                )
        # All together are a way of their own; small sums of many kinds fit by chance.
        for number in range(1, len(of_kind)) if len(of_kind) <= MOST_KINDS else ():
            for kinds in itertools.combinations(of_kind, number):
                rest = math.sqrt(max(0.0, total - sum(of_kind[kind] for kind in kinds)))
                if is_near(rest, norm, 1e-9):
                    return (
                        f"of the gradients sharded over {axis}, those of {listed(kinds)} are "
                        f"counted on the first rank of {axis} alone, as if they were copies"
                    )
    return ""


def norms_of_own(runs: Sequence[RankRun], step: int) -> str:
    """What is missing, if every rank's norm is that of the gradients that it holds; else ""."""
    for run in runs:
        own = math.sqrt(sum(_local(runs, step, run.rank, name) for name in run.placements))
        if not is_near(own, run.steps[step].norm, 1e-9):
            return ""
    holders = holders_of(runs)
    apart = [name for name, own in holders.items() if any(len(r) < len(runs) for r in own.values())]
    return (
        f"each is that of the gradients that the rank holds, and lacks those of {listed(apart, 3)} "
        "that other ranks hold. Add up the squares of these gradients, and of no copies, over the "
        "ranks, before the root"
    )


def true_norm(runs: Sequence[RankRun], step: int) -> float:
    """The norm of the plan's own gradients, each element counted once."""
    return math.sqrt(sum(_squares(runs, step, name) for name in holders_of(runs)))


def _squares(runs: Sequence[RankRun], step: int, name: str) -> float:
    """The sum of squares of one gradient, each of its shards counted once."""
    return sum(_local(runs, step, ranks[0], name) for ranks in holders_of(runs)[name].values())


def _local(runs: Sequence[RankRun], step: int, rank: int, name: str) -> float:
    gradient = runs[rank].steps[step].gradients.get(name)
    return 0.0 if gradient is None else gradient.aa


def _num_stages(runs: Sequence[RankRun]) -> dict[str, int]:
    """Parameter -> the number of ranks of pp that have it: several for a tied weight."""
    places: dict[str, set[int]] = {}
    for run in runs:
        for name in run.placements:
            # Meshes of other code may have no axis of that name.
            places.setdefault(name, set()).add(run.coordinates.get("pp", 0))
    return {name: len(found) for name, found in places.items()}


def _ways_of_counting(runs: Sequence[RankRun], step: int) -> Iterator[tuple[str, float]]:
    holders = holders_of(runs)
    once = {name: _squares(runs, step, name) for name in holders}
    total = sum(once.values())
    placed = {name: axes for run in runs for name, axes in run.placements.items()}
    axes = sorted({axis for run in runs for axis in next(iter(run.placements.values()), {})})
    degrees = {axis: len({run.coordinates[axis] for run in runs}) for axis in axes}
    of_ranks = [sum(_local(runs, step, run.rank, name) for name in run.placements) for run in runs]
    yield "the largest of the ranks' own norms is taken", math.sqrt(max(of_ranks))
    yield "the ranks' own norms are added, not their squares", sum(map(math.sqrt, of_ranks))
    mean = sum(map(math.sqrt, of_ranks)) / len(of_ranks)
    yield "the mean of the ranks' own norms is taken", mean
    groups: dict[tuple[str, ...], float] = defaultdict(float)
    for name in once:
        groups[tuple(placed[name].values())] += once[name]
    yield (
        "the norms of gradients that are placed in different ways are added, not their squares",
        sum(map(math.sqrt, groups.values())),
    )
    stages = sorted({run.coordinates.get("pp", 0) for run in runs})
    for stage in stages if len(stages) > 1 else []:
        here = {n for run in runs if run.coordinates.get("pp", 0) == stage for n in run.placements}
        yield (
            f"only the gradients on pp {stage} are counted, without a sum over pp",
            math.sqrt(sum(once[name] for name in here)),
        )
    one_axis = []
    for axis in axes:
        replicated = [name for name in placed if placed[name][axis] == "replicated"]
        extra = (degrees[axis] - 1) * sum(once[name] for name in replicated)
        one_axis.append(math.sqrt(total + extra))
        yield f"gradients replicated over {axis} are counted {degrees[axis]} times", one_axis[-1]
    tied = {name: n for name, n in _num_stages(runs).items() if n > 1}
    if tied:
        extra = sum((n - 1) * once[name] for name, n in tied.items())
        one_axis.append(math.sqrt(total + extra))
        yield (
            f"the tied weight {listed(tied)} is counted once on each stage that has a copy of it",
            one_axis[-1],
        )
    copies = {name: len(next(iter(ranks.values()))) for name, ranks in holders.items()}
    every_copy = math.sqrt(sum(copies[name] * once[name] for name in once))
    # If gradients are replicated over one axis only, this is that axis's norm again.
    if not any(is_near(every_copy, norm, 1e-9) for norm in one_axis):
        yield (
            "gradients replicated over several axes are counted once on each rank that holds them",
            every_copy,
        )
    for axis in axes:
        for kinds in (("strided",), ("sharded",), ("sharded", "strided")):
            names = [name for name in placed if placed[name][axis] in kinds]
            if not names:
                continue
            words = " or ".join(how_in_words(kind, axis) for kind in kinds)
            missing = sum(
                _local(runs, step, ranks[0], name)
                for name in names
                for ranks in holders[name].values()
                if runs[ranks[0]].coordinates[axis] > 0
            )
            yield (
                f"gradients {words} are counted as if they were replicated: only the "
                f"shard of the first rank of {axis} is counted",
                math.sqrt(max(0.0, total - missing)),
            )
            yield (
                f"gradients {words} are counted {degrees[axis]} times",
                math.sqrt(total + (degrees[axis] - 1) * sum(once[name] for name in names)),
            )
    experts = [name for name in placed if ".experts." in name]
    if experts:
        yield (
            "the gradients of routed experts are not counted",
            math.sqrt(max(0.0, total - sum(once[name] for name in experts))),
        )
    for axis in axes if experts else ():
        missing = sum(
            _local(runs, step, ranks[0], name)
            for name in experts
            for ranks in holders[name].values()
            if placed[name][axis] == "sharded" and runs[ranks[0]].coordinates[axis] > 0
        )
        yield (
            f"of the gradients of routed experts, only those on {axis} 0 are counted, as if they "
            f"were replicated over {axis}",
            math.sqrt(max(0.0, total - missing)),
        )
    for run in runs:
        own = math.sqrt(sum(_local(runs, step, run.rank, name) for name in run.placements))
        if not is_near(own, math.sqrt(total)):
            yield "each rank counts only its own gradients, without a sum over ranks", own

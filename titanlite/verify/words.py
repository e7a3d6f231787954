"""Numbers and sets of a plan in words: a factor, some ranks, some parameters; torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.verify.record import RankRun

# How exact a factor has to be to be one: far above rounding in float64, far below a coincidence.
EXACT = 1e-6


def name_factor(
    factor: float, dims: ParallelDims, *, num_microbatches: int, num_targets: int, batch: int
) -> str:
    """What of the plan a factor is, such as "the degree of cp"; empty where it is nothing known."""
    degrees = {axis: n for axis, n in dims.degrees.items() if n > 1}
    known: dict[str, float] = {f"the degree of {axis}": n for axis, n in degrees.items()}
    known |= {
        f"the degrees of {a} and {b}": degrees[a] * degrees[b]
        for a, b in itertools.combinations(degrees, 2)
    }
    if len(degrees) > 2:
        known["the number of ranks"] = dims.world_size
    if num_microbatches > 1:
        known["the number of microbatches"] = num_microbatches
    known["the number of targets in the step"] = num_targets
    known["the number of sequences in the step"] = batch
    squares = {f"the square of {words}": n * n for words, n in known.items()}
    for candidates in (known, squares):
        same = [words for words, n in candidates.items() if is_near(factor, n)]
        inverse = [words for words, n in candidates.items() if is_near(factor, 1 / n)]
        if same:
            return " or ".join(same)
        if inverse:
            return "1 over " + " or ".join(inverse)
    return ""


def is_near(value: float, expected: float, tolerance: float = EXACT) -> bool:
    """Whether two numbers are one, but for rounding."""
    return math.isfinite(value) and abs(value - expected) <= tolerance * max(abs(expected), 1e-300)


def name_ranks(ranks: Collection[int], runs: Sequence[RankRun], among: Collection[int]) -> str:
    """Some of the ranks `among` in words, by their place on the mesh where that says it."""
    chosen, all_ranks = set(ranks), set(among)
    if chosen == all_ranks:
        return "on every rank" if len(chosen) > 1 else f"on rank {min(chosen)}"
    if len(chosen) == 1:
        rank = min(chosen)
        place = {a: n for a, n in runs[rank].coordinates.items() if _degree(runs, a) > 1}
        where = ", ".join(f"{axis} {n}" for axis, n in place.items())
        return f"on rank {rank} alone ({where})"
    for axis in runs[0].coordinates:
        positions = {runs[rank].coordinates[axis] for rank in chosen}
        if _degree(runs, axis) > 1 and chosen == {
            rank for rank in all_ranks if runs[rank].coordinates[axis] in positions
        }:
            return f"on the ranks with {axis} {listed(sorted(positions))}"
    return f"on ranks {listed(sorted(chosen))}"


def _degree(runs: Sequence[RankRun], axis: str) -> int:
    return len({run.coordinates[axis] for run in runs})


def listed(values: Iterable[object], most: int = 6) -> str:
    """ "a, b and c"; the first few where there are many."""
    words = [str(value) for value in values]
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def name_parameters(names: Collection[str], runs: Sequence[RankRun], what: str) -> str:
    """Some of all parameters in words: by stage, by how they are placed, or by their names."""
    chosen = set(names)
    placed: dict[str, Mapping[str, str]] = {}
    stages: dict[str, int] = {}
    for run in runs:
        placed.update(run.placements)
        stages.update(dict.fromkeys(run.placements, run.coordinates["pp"]))
    if chosen == set(placed):
        return f"all {len(placed)} {what}s"
    shown = f"{len(chosen)} of {len(placed)} {what}s ({listed(sorted(chosen), 3)})"
    if len(chosen) == 1:
        return f"the {what} of {min(chosen)}" if what != "parameter" else min(chosen)
    places = sorted(set(stages.values()))
    for count in range(1, len(places)):
        for some in itertools.combinations(places, count):
            if chosen == {name for name, place in stages.items() if place in some}:
                return f"{shown}, those of the stages on pp {listed(some)}"
    axes = next(iter(placed.values()), {})
    for axis in axes:
        for how in ("replicated", "strided", "sharded"):
            same = {name for name, axes_of in placed.items() if axes_of.get(axis) == how}
            if chosen == same:
                return f"{shown}, exactly those {how_in_words(how)} over {axis}"
    for axis in axes:
        replicated = {name for name, axes_of in placed.items() if axes_of[axis] == "replicated"}
        if chosen <= replicated and replicated != set(placed):
            return f"{shown}, all replicated over {axis}"
        if not chosen & replicated and replicated:
            return f"{shown}, all sharded over {axis}"
    return shown


def be(who: str) -> str:
    """The verb for what name_parameters gave: "the gradient of x" is, "all 9 gradients" are."""
    return "is" if who.startswith("the ") else "are"


def agree(who: str, verb: str) -> str:
    """Another verb for it: "differ" or "differs"."""
    is_one = be(who) == "is"
    return {"do": "does", "are": "is"}.get(verb, f"{verb}s") if is_one else verb


def how_in_words(how: str) -> str:
    """A placement as a sentence has it."""
    return "sharded twice along one dimension, the second time" if how == "strided" else how

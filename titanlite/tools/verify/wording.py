"""Words for a factor, a set of ranks or a set of parameters in a diagnosis; torch-free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.verify.record import RankRun

# The relative tolerance within which a factor counts as equal to a degree or a count: far above
# rounding error in float64, far too small for a coincidence.
EXACT = 1e-6


class Explained(str):
    """A sentence that says what is wrong with the gradients `names`."""

    names: frozenset[str]
    is_exact: bool
    """Whether it says more than where a difference begins, however few gradients it explains."""

    def __new__(cls, text: str, names: Iterable[str], *, is_exact: bool = False) -> Explained:
        self = super().__new__(cls, text)
        self.names, self.is_exact = frozenset(names), is_exact
        return self


def name_factor(
    factor: float, dims: Grid, *, num_microbatches: int = 0, num_targets: float = 0, batch: int = 0
) -> str:
    """The degree or count that equals a factor, such as "the degree of cp"; "" for none.

    A count of 0 is unknown.
    """
    degrees = {axis: n for axis, n in dims.degrees.items() if n > 1}
    known: dict[str, float] = {f"the degree of {axis}": n for axis, n in degrees.items()}
    if (ep := getattr(dims, "ep", 1)) > 1:
        known["the degree of ep"] = ep
        if (shards := getattr(dims, "num_expert_shards", 1)) > 1:
            known["the number of shards of each expert (efsdp)"] = shards
    known |= {
        f"the degrees of {a} and {b}": degrees[a] * degrees[b]
        for a, b in itertools.combinations(degrees, 2)
    }
    if len(degrees) > 2:
        known["the number of ranks"] = dims.world_size
    if num_microbatches > 1:
        known["the number of microbatches"] = num_microbatches
    if num_targets:
        known["the number of targets in the step"] = num_targets
    if batch:
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
    """Whether two numbers are equal up to rounding error."""
    return math.isfinite(value) and abs(value - expected) <= tolerance * max(abs(expected), 1e-300)


def times(factor: float) -> str:
    """ "2 times"; with enough digits to be told from 1."""
    return f"{distinct_texts(factor, 1.0)[0]} times"


def distinct_texts(*values: float) -> list[str]:
    """Numbers with as many digits as it takes for different ones to look different."""
    for digits in range(6, 17):
        shown = [f"{value:.{digits}g}" for value in values]
        if len(set(shown)) == len(set(values)):
            break
    return shown


def name_ranks(ranks: Collection[int], runs: Sequence[RankRun], among: Collection[int]) -> str:
    """Words for some of the ranks `among`: by mesh coordinates where possible, else by number."""
    chosen, all_ranks = set(ranks), set(among)
    if chosen == all_ranks:
        return "on every rank" if len(chosen) > 1 else f"on rank {min(chosen)}"
    if len(chosen) == 1:
        rank = min(chosen)
        place = {a: n for a, n in runs[rank].coordinates.items() if _degree(runs, a) > 1}
        where = ", ".join(f"{axis} {n}" for axis, n in place.items())
        return f"on rank {rank} only ({where})"
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
    """ "a, b and c"; only the first `most` if there are more."""
    words = [str(value) for value in values]
    if len(words) > most:
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def joined(first: str, *more: str) -> str:
    """Sentences after each other; empty ones are left out, and names keep their first letter."""
    for sentence in filter(None, more):
        is_word = sentence.split(None, 1)[0].rstrip(",").isalpha()
        begin = sentence[0].upper() if is_word else sentence[0]
        stop = "" if first.endswith("?") else "."
        first = f"{first}{stop} {begin}{sentence[1:]}" if first else sentence
    return first


def name_parameters(names: Collection[str], runs: Sequence[RankRun], what: str) -> str:
    """Words for a set of parameters: their names, and the stage or placement they share."""
    chosen = set(names)
    placed: dict[str, Mapping[str, str]] = {}
    stages: dict[str, set[int]] = {}
    for run in runs:
        placed.update(run.placements)
        for name in run.placements:
            stages.setdefault(name, set()).add(run.coordinates.get("pp", 0))
    if chosen == set(placed):
        return f"all {len(placed)} {what}s"
    shown = f"{len(chosen)} of {len(placed)} {what}s ({listed(sorted(chosen), 3)}"
    if len(chosen) == 1:
        return f"the {what} of {min(chosen)}" if what != "parameter" else min(chosen)
    places = sorted(set().union(*stages.values()))
    for count in range(1, len(places)):
        for some in itertools.combinations(places, count):
            if chosen == {name for name, held in stages.items() if not held.isdisjoint(some)}:
                return f"{shown}; exactly those on pp {listed(some)})"
    style_of = {name: style for run in runs for name, style in run.styles.items()}
    for style in dict.fromkeys(style_of.values()):
        if chosen == {name for name, own in style_of.items() if own == style}:
            return f"{shown}; exactly those of {style} in the tensor-parallel plan)"
    axes = next(iter(placed.values()), {})
    for axis in axes:
        for how in ("replicated", "strided", "sharded"):
            same = {name for name, axes_of in placed.items() if axes_of.get(axis) == how}
            if chosen == same:
                return f"{shown}; exactly those {how_in_words(how, axis)})"
    for axis in axes:
        replicated = {name for name, axes_of in placed.items() if axes_of[axis] == "replicated"}
        if chosen <= replicated and replicated != set(placed):
            return f"{shown}; all replicated over {axis})"
        if not chosen & replicated and replicated:
            return f"{shown}; all sharded over {axis})"
    others = sorted(placed.keys() - chosen)
    if len(chosen) > max(3, len(others)) and len(others) <= 6:
        return f"{len(chosen)} of {len(placed)} {what}s (all but {listed(others)})"
    return f"{shown})"


def be(who: str) -> str:
    """ "is" or "are" for a result of name_parameters: "the gradient of x" is, "9 gradients" are."""
    return "is" if who.startswith("the ") else "are"


def be_a_sum(who: str) -> str:
    return "is a sum" if be(who) == "is" else "are sums"


def agree(who: str, verb: str) -> str:
    """`verb`, or its third person singular: "differ" or "differs"."""
    is_one = be(who) == "is"
    return {"do": "does", "are": "is", "have": "has"}.get(verb, f"{verb}s") if is_one else verb


def how_in_words(how: str, axis: str) -> str:
    """A placement over an axis, as words after a noun: "sharded over tp"."""
    if how == "strided":
        return f"that {axis} shards along an already sharded dimension"
    return f"{how} over {axis}"


def beyond(where: str) -> str:
    """What is missing where the rank's part of a tensor "begins" or "ends"."""
    what = "before" if where == "begins" else "after"
    return (
        f"where the rank's part {where}: what comes {what} it, such as neighbours or other tokens, "
        "is on another rank, and must be sent from there, or be taken before the tensor is cut"
    )

"""Which parts of the batch a gradient lacks, or has with a wrong coefficient; torch-free.

Of a job the parts are cells: the targets of one microbatch on one data- and context-parallel rank
(cells.py). Of other code they are the parts that its ranks are given. A coefficient is relative to
that in the reference's gradient.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

from titanlite.tools.verify.record import (
    LEFT,
    Cell,
    Fit,
    RankRun,
    RankTrace,
    ReferenceTrace,
    Shares,
)
from titanlite.tools.verify.wording import (
    Explained,
    be_a_sum,
    is_near,
    listed,
    name_parameters,
    name_ranks,
)

# How close a coefficient must be to a number to equal it.
NEAR = 1e-5

GROUPS: dict[str, Callable[[Cell], object]] = {
    "data-parallel rank": lambda cell: cell[0],
    "rank's part of the sequence": lambda cell: cell[2],
    "rank (of dp and cp)": lambda cell: (cell[0], cell[2]),
    "microbatch": lambda cell: (cell[0], cell[1]),
    "microbatch on each rank": lambda cell: cell,
}


def sums_of_parts(
    runs: Sequence[RankRun],
    names: Sequence[str],
    fits: Mapping[int, Mapping[str, Fit]],
    describe: Callable[[Shares], str],
    what: str,
) -> Iterator[str]:
    """Which coefficients are wrong in the gradients `names` that are sums over parts of the batch.

    `fits` has these sums by rank and name. `describe` says what is wrong with the coefficients of
    all parts, "" for nothing; `what` says what is summed.
    """
    made_of: dict[Shares, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        of_ranks = [(rank, *of_rank[name]) for rank, of_rank in fits.items() if name in of_rank]
        if any(left > LEFT for _, _, left in of_ranks):
            continue
        for rank, shares, _ in of_ranks:
            known = next((other for other in made_of if _same(shares, other)), shares)
            made_of[known][name].append(rank)
    for shares, ranks_of in made_of.items():
        if not (words := describe(shares)):
            continue
        who = name_parameters(list(ranks_of), runs, "gradient")
        ranks = sorted({rank for ranks in ranks_of.values() for rank in ranks})
        holders = sorted(r for r, of_rank in fits.items() if any(n in of_rank for n in ranks_of))
        where = name_ranks(ranks, runs, holders)
        yield Explained(
            f"{who} {be_a_sum(who)} {what} with wrong coefficients, {where}: {words}", ranks_of
        )


def _same(a: Shares, b: Shares) -> bool:
    return all(abs(x - y) < 10 * NEAR * max(1.0, abs(y)) for x, y in zip(a, b, strict=True))


def describe_parts(
    shares: Shares,
    weights: Shares,
    parts: Sequence[str],
    numbers: Mapping[str, Shares] | None = None,
    *,
    of_loss: bool = False,
    order: Sequence[int] = (),
) -> str:
    """What is wrong with the coefficients of the named parts of the batch; "" for nothing.

    `weights` are the parts' shares of the whole mean, `numbers` the numbers of elements of each
    part in the tensors of the batch, `order` the numbers of their microbatches. `of_loss`: the loss
    is wrong, too; then a coefficient that no count explains is that of a loss with other values.
    """
    if all(is_near(share, shares[0], NEAR) for share in shares):
        # The same factor for every part is explain_gradients' subject.
        return ""
    counts = tuple(share * weight for share, weight in zip(shares, weights, strict=True))
    shown = [f"{weight:.4g} ({who})" for weight, who in zip(weights, parts, strict=True)]
    even, total = all(is_near(count, counts[0], NEAR) for count in counts), sum(counts)
    # Means add up to a mean, or to the sum, or the mean, of means; other sums are other weights.
    if even and any(is_near(total, n, NEAR) for n in (1, len(parts), 1 / len(parts))):
        return (
            f"a mean of means. Each part counts {counts[0]:.4g}, but the parts' shares of the "
            f"whole mean are {listed(shown, 4)}, since they have different numbers"
            f"{'' if _follow(weights, numbers) or not numbers else ', or weights,'} of targets. "
            "Divide the sum of all losses by the number of targets in the whole batch"
        )
    if name := _follow(counts, numbers):
        return (
            f"each part counts in proportion to its number of elements in {name}, but the parts' "
            f"shares of the whole mean are {listed(shown, 4)}, since the loss gives targets "
            "different weights. Divide the sum of all losses by the sum of these weights"
        )
    missing = [who for share, who in zip(shares, parts, strict=True) if abs(share) < NEAR]
    rest = [share for share in shares if abs(share) >= NEAR]
    if missing and all(is_near(share, rest[0], NEAR) for share in rest):
        scaled = (
            "" if is_near(rest[0], 1.0, NEAR) else f", and the others count {rest[0]:.4g} times"
        )
        return f"the part of {listed(missing)} is missing{scaled}"
    if missing:
        shown = [
            f"{share:.4g} times ({who})"
            for share, who in zip(shares, parts, strict=True)
            if abs(share) >= NEAR
        ]
        return f"the part of {listed(missing)} is missing, and the others count {listed(shown, 4)}"
    if of_loss and not all(_is_simple(share) for share in shares):
        return ""
    by_value: dict[float, list[str]] = defaultdict(list)
    for share, who in sorted(zip(shares, parts, strict=True), key=lambda both: round(both[0], 4)):
        by_value[round(share, 4)].append(who)
    odd = [f"{value:.4g} times ({_name_parts(own)})" for value, own in by_value.items()]
    text = f"the parts count {listed(odd, 4)}"
    ratios = {round(after / before, 2) for before, after in itertools.pairwise(by_value) if before}
    pairs = sorted((index, round(share, 4)) for index, share in zip(order, shares, strict=False))
    is_later_more = pairs == sorted(pairs, key=lambda both: both[1])
    if len(ratios) == 1 and pairs == sorted(pairs, key=lambda both: -both[1]) and min(by_value) > 1:
        text += (
            f". The earlier a microbatch, the more it counts, by {ratios.pop():g} each time: what "
            "is accumulated is multiplied again with each later one, as by a buffer that is added "
            "to itself"
        )
        return text
    if len(ratios) == 1 and min(by_value) > 0 and max(by_value) == 1.0 and is_later_more:
        text += (
            f". The earlier a microbatch, the less it counts, by {ratios.pop():g} each time: what "
            "is accumulated is scaled again after later ones (each run of a pipeline schedule of "
            "torch does so with scale_grads=True), or the scale changes between them"
        )
    elif not order and not any(map(_is_simple, shares)):
        text += (
            ". No counts give such numbers: is something that is not linear, such as clipping or a "
            "projection, done to each rank's gradients before their mean? It belongs after that"
        )
    return text


def _name_parts(names: Sequence[str]) -> str:
    """Names of parts, with the microbatches of the same ranks together."""
    numbers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        first, _, ranks = name.partition(" of ")
        numbers[ranks or first] += [first.removeprefix("microbatch ")] * bool(ranks)
    together: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for ranks, own in numbers.items():
        together[tuple(own)].append(ranks)
    return listed(
        [
            f"microbatch{'es' * (len(own) > 1)} {listed(own)} of {listed(ranks, 3)}"
            if own
            else listed(ranks, 4)
            for own, ranks in together.items()
        ],
        3,
    )


def _is_simple(number: float) -> bool:
    """Whether a number is a fraction of small integers, as counts are."""
    return is_near(number, float(Fraction(number).limit_denominator(16)), NEAR)


def _follow(counts: Shares, numbers: Mapping[str, Shares] | None) -> str:
    """The tensor whose numbers of elements, different ones, the counts are proportional to."""
    for name, own in (numbers or {}).items():
        if len(set(own)) > 1 and min(own) > 0 and len(own) == len(counts):
            ratios = [count / number for count, number in zip(counts, own, strict=True)]
            if ratios[0] and all(is_near(ratio, ratios[0], NEAR) for ratio in ratios):
                return name
    return ""


def describe_shares(
    reference: ReferenceTrace,
    traces: Sequence[RankTrace],
    runs: Sequence[RankRun],
    names: Sequence[str],
    name_factor: Callable[[float], str] = lambda factor: "",
    num_microbatches: int = 1,
) -> Iterator[str]:
    """Which coefficients are wrong in the gradients `names` that are sums of cells' gradients.

    `name_factor` names the degree or count of the plan that a factor equals; "" for none.
    `num_microbatches` is that of one run of a pipeline's schedule.
    """
    cells = [index for index, count in enumerate(reference.targets) if count]

    def describe(of_all: Shares) -> str:
        shares = tuple(of_all[index] for index in cells)
        if all(abs(share - 1.0) < NEAR for share in shares):
            return ""
        if all(abs(share - shares[0]) < NEAR * max(1.0, abs(share)) for share in shares):
            same = name_factor(shares[0])
            also = f", and {shares[0]:.6g} is {same}" if same else ""
            return f"every contribution counts {shares[0]:.6g} times{also}"
        return _scaled_by_run(reference, cells, shares, num_microbatches) or _describe_cells(
            reference, cells, shares
        )

    fits = {trace.rank: trace.shares for trace in traces}
    yield from sums_of_parts(runs, names, fits, describe, "of correct contributions")


def _scaled_by_run(
    reference: ReferenceTrace, cells: list[int], shares: Shares, num_microbatches: int
) -> str:
    """Coefficients that are powers of 1/n, n being the microbatches of a run of the schedule."""
    n = num_microbatches
    if n < 2 or not all(0.0 < share < 0.999 for share in shares):
        return ""
    powers = [round(-math.log(share, n)) for share in shares]
    if len(set(powers)) < 2 or any(
        abs(share * n**power - 1.0) > 1e-3 for share, power in zip(shares, powers, strict=True)
    ):
        return ""
    chosen = [reference.cells[index] for index in cells]
    words = []
    for power in sorted(set(powers), reverse=True):
        some = [c for c, own in zip(chosen, powers, strict=True) if own == power]
        words.append(f"1/{n}{f'^{power}' if power > 1 else ''} for {_name_cells(some, chosen)}")
    return (
        f"the coefficients are {listed(words)}, and {n} is the number of microbatches in a run of "
        "the schedule: each run scales all gradients by 1/n, and those of earlier runs once more. "
        "The loss is divided already: do not scale gradients (scale_grads = False)"
    )


def _describe_cells(reference: ReferenceTrace, cells: list[int], shares: Shares) -> str:
    chosen = [reference.cells[index] for index in cells]
    targets = [reference.targets[index] for index in cells]
    for group, key_of in GROUPS.items():
        totals: dict[object, float] = defaultdict(int)
        for cell, count in zip(chosen, targets, strict=True):
            totals[key_of(cell)] += count
        predicted = [sum(targets) / (len(totals) * totals[key_of(cell)]) for cell in chosen]
        if len(totals) > 1 and all(
            abs(p - s) < NEAR * max(1.0, p) for p, s in zip(predicted, shares, strict=True)
        ):
            return (
                f"a mean of means. The mean is taken over each {group}, and then over these means, "
                f"although they cover {listed(totals.values(), 4)} targets. Divide the sum of all "
                "losses by the number of targets in the step"
            )
    missing = [c for c, share in zip(chosen, shares, strict=True) if abs(share) < NEAR]
    present = [share for share in shares if abs(share) >= NEAR]
    if missing and all(abs(share - 1.0) < NEAR for share in present):
        return f"the contribution of {_name_cells(missing, chosen)} is missing"
    twice = [c for c, share in zip(chosen, shares, strict=True) if abs(share - 1.0) >= NEAR]
    other = {round(s, 4) for s in shares if abs(s - 1.0) >= NEAR}
    if len(twice) < len(chosen) and len(other) == 1:
        return f"the contribution of {_name_cells(twice, chosen)} counts {other.pop():g} times"
    shown = [f"{s:.4g} for {_name_cell(c)}" for c, s in zip(chosen, shares, strict=True)]
    return f"the coefficients are {listed(shown, 4)}"


def _name_cells(some: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Cells in words: by one axis if they are all the cells of some of its places, else listed."""
    for axis, one, several in (
        (1, "microbatch", "microbatches"),
        (0, "data-parallel rank", "data-parallel ranks"),
        (2, "cp rank", "cp ranks"),
    ):
        places = sorted({cell[axis] for cell in some})
        if len(some) == sum(cell[axis] in places for cell in cells) and len(some) < len(cells):
            total = len({cell[axis] for cell in cells})
            last = ", the last" if places == [total - 1] else ""
            words = one if len(places) == 1 else several
            return f"{words} {listed(places)} of {total} (counted from 0{last})"
    return listed(map(_name_cell, some), 3)


def _name_cell(cell: Cell) -> str:
    return f"(dp {cell[0]}, microbatch {cell[1]}, cp {cell[2]})"

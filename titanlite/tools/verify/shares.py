"""Which cells of the batch a gradient lacks, or has with a wrong coefficient; torch-free.

A cell is the targets of one microbatch on one data- and context-parallel rank (cells.py).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from titanlite.tools.verify.record import Cell, RankRun, RankTrace, ReferenceTrace
from titanlite.tools.verify.wording import be_a_sum, listed, name_parameters, name_ranks

# How close a coefficient must be to a number to equal it, and the largest residual of a fit.
NEAR, LEFT = 1e-5, 1e-6

GROUPS: dict[str, Callable[[Cell], object]] = {
    "data-parallel rank": lambda cell: cell[0],
    "rank's part of the sequence": lambda cell: cell[2],
    "rank (of dp and cp)": lambda cell: (cell[0], cell[2]),
    "microbatch": lambda cell: (cell[0], cell[1]),
    "microbatch on each rank": lambda cell: cell,
}


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
    made_of: dict[tuple[float, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        of_ranks = [(t.rank, *t.shares[name]) for t in traces if name in t.shares]
        if not of_ranks or any(left > LEFT for _, _, left in of_ranks):
            continue
        for rank, shares, _ in of_ranks:
            key = _known(made_of, tuple(shares[index] for index in cells))
            made_of[key][name].append(rank)
    for shares, ranks_of in made_of.items():
        if all(abs(share - 1.0) < NEAR for share in shares):
            continue
        who = name_parameters(list(ranks_of), runs, "gradient")
        ranks = sorted({rank for ranks in ranks_of.values() for rank in ranks})
        holders = sorted({t.rank for t in traces if any(name in t.shares for name in ranks_of)})
        where = name_ranks(ranks, runs, holders)
        what = _scaled_by_run(reference, cells, shares, num_microbatches) or _describe(
            reference, cells, shares
        )
        if all(abs(share - shares[0]) < NEAR * max(1.0, abs(share)) for share in shares):
            same = name_factor(shares[0])
            what = f"every contribution counts {shares[0]:.6g} times"
            what += f", and {shares[0]:.6g} is {same}" if same else ""
        yield (
            f"{who} {be_a_sum(who)} of correct contributions with wrong coefficients, {where}: "
            f"{what}"
        )


def _known(known: dict[tuple[float, ...], dict[str, list[int]]], own: tuple[float, ...]) -> tuple:
    for other in known:
        if all(abs(a - b) < 10 * NEAR for a, b in zip(own, other, strict=True)):
            return other
    return own


def _scaled_by_run(
    reference: ReferenceTrace, cells: list[int], shares: tuple[float, ...], num_microbatches: int
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


def _describe(reference: ReferenceTrace, cells: list[int], shares: tuple[float, ...]) -> str:
    chosen = [reference.cells[index] for index in cells]
    targets = [reference.targets[index] for index in cells]
    for group, key_of in GROUPS.items():
        totals: dict[object, int] = defaultdict(int)
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

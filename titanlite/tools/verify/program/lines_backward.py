"""On a rank: finds the first line in the backward pass whose result has a wrong gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.program.code_trace import CodeTracer
from titanlite.tools.verify.program.lines import (
    Pair,
    counterparts_of,
    pairs_of,
    shares_of,
    state_of,
)
from titanlite.tools.verify.program.values import Place, Values
from titanlite.tools.verify.tracing import EXACT, gathered

# No more wrong gradients are reduced.
MOST_REDUCED = 24


def wrong_gradient(
    tracer: CodeTracer, values: Values, known: Values, num_microbatches: int
) -> tuple[tuple[str, ...], str]:
    """The line whose result is the first with a wrong gradient, and the lines that read it, whose
    results have right ones; and which reduction of what the first of these computes is right, if
    that is the ranks' largest or smallest. Every rank of the world must call this.
    """
    others, _ = counterparts_of(values, known, num_microbatches)
    found = _first_wrong(tracer, values, known, num_microbatches, others)
    lines = tuple(values.places[number][0][1] for number in found)
    places = gathered([values.places[number] for number in found[1:2]])
    pairs = pairs_of(values, known, others, num_microbatches)
    is_known = all(own and own == places[0] for own in places)
    ways: dict[Place, str] = {}
    if is_known and all(gathered(found[1] in pairs if is_known else False)):
        ways = shares_of(tracer, {places[0][0]: pairs[found[1]]}, places[0])
    way = ways.get(places[0][0], "") if is_known else ""
    return lines, way if "imum over" in way else ""


def _first_wrong(
    tracer: CodeTracer,
    values: Values,
    known: Values,
    num_microbatches: int,
    others: Mapping[int, int],
) -> tuple[int, ...]:
    """The value that has the first wrong gradient, and those computed from it, with right ones.

    A gradient may have the factor of those of the microbatch that come before it. One that is right
    after a reduction is no wrong one.
    """
    every = {
        number: (own, whole, share)
        for number, (own, whole, share) in pairs_of(
            values, known, others, num_microbatches, of_gradients=True
        ).items()
        # What is no part of a microbatch, such as a weight, has only its share of the gradient.
        if share[1] == 1 or own.shape != whole.shape
    }
    factors = _factors(tracer, every)
    pairs = {n: (every[n][0] / factor, *every[n][1:]) for n, factor in factors.items()}
    states = {values.places[number]: state_of(tracer, *pair) for number, pair in pairs.items()}
    everyone = gathered(states)
    wrong = dict.fromkeys(p for of_rank in everyone for p, s in of_rank.items() if s == "wrong")
    unknown = {place for of_rank in everyone for place, one in of_rank.items() if one is None}
    found = {values.places[number]: pair for number, pair in pairs.items()}
    some = list(wrong)[-MOST_REDUCED:]
    reduced = shares_of(tracer, {place: found[place] for place in some if place in found}, some)
    shares = {place for of_rank in gathered(list(reduced)) for place in of_rank}
    readers: dict[int, list[int]] = {}
    is_right: list[bool] = []
    for number, with_gradient in enumerate(values.with_gradient):
        both = *(with_gradient or ()), *values.behind.get(number, ())
        sources = {source for source in both if source < number}
        for source in sources:
            readers.setdefault(source, []).append(number)
        # A function may give back otherwise what it makes right itself, inside or after it.
        place, before = values.places[number], [is_right[one] for one in sources]
        is_known = number in pairs and place not in wrong and place not in unknown
        is_right.append(is_known or (bool(before) and all(before)))
    for number in sorted(pairs, reverse=True):
        place = values.places[number]
        if is_right[number] or place not in some or place in shares:
            continue
        after = [is_right[one] for one in _judged(number, readers, pairs)]
        if not after or not all(after):
            continue
        passes: dict[int, bool | None] = dict.fromkeys(
            reader for reader in readers[number] if reader in values.gradients
        )
        for reader in passes:
            there = others.get(reader, -1), others.get(number, -1)
            own, whole = values.passed.get((reader, number)), known.passed.get(there)
            if own is not None and whole is not None:
                own = own / factors[number]
                passes[reader] = state_of(tracer, own, whole, pairs[number][2]) == "right"
        bad = [reader for reader, right in passes.items() if right is False]
        bad = bad or [reader for reader, right in passes.items() if right is None]
        return (number, *bad) if bad else ()
    return ()


def _judged(
    number: int, readers: Mapping[int, list[int]], pairs: Mapping[int, Pair]
) -> Iterator[int]:
    """The values computed from one, the first on each way that can be compared."""
    stack = list(readers.get(number, ()))
    while stack:
        reader = stack.pop()
        if reader in pairs:
            yield reader
        else:
            stack += readers.get(reader, ())


def _factors(tracer: CodeTracer, pairs: Mapping[int, Pair]) -> dict[int, float]:
    """For each gradient the factor of the last one of its microbatch, if that is a multiple."""
    of_microbatch: dict[int, float] = {}
    for number in sorted(pairs, reverse=True):
        own, whole, share = pairs[number]
        if own.numel() > 1 and share[0] not in of_microbatch:
            of_microbatch[share[0]] = _factor(tracer, own, whole, share)
    return {n: f for n, (*_, (index, _)) in pairs.items() if (f := of_microbatch.get(index))}


def _factor(tracer: CodeTracer, own: Tensor, whole: Tensor, share: tuple[int, int]) -> float:
    """How many times as large as its part of one process's a gradient is; 0 if it is no multiple"""
    for select in tracer.ways(own, whole, share):
        part = select(whole)
        one = agreement(own, part, part) if part.shape == own.shape else None
        factor = one.ab / one.bb if one is not None and one.bb else 0.0
        if one is None or not factor or not math.isfinite(factor):
            continue
        if one.aa - factor * one.ab <= EXACT**2 * one.aa:
            return factor
    return 0.0

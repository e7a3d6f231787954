"""On a rank: which terms of a loss differ from those of one process, or are missing.

A loss is often a sum: of a cross-entropy, a balance of experts, a penalty. Both sides may compute a
term by other lines, so terms are paired by their values, over all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from titanlite.tools.verify.evidence import EXPLAINED
from titanlite.tools.verify.program.values import Values
from titanlite.tools.verify.record import WrongTerm, operator_of
from titanlite.tools.verify.tracing import gathered

# Operators that leave a number as it is.
PASSING = ("view", "_unsafe_view", "alias", "clone", "_to_copy", "squeeze", "unsqueeze", "expand")


@dataclass(frozen=True)
class _Term:
    number: int
    """Of the value."""
    line: str
    value: float
    """With the factors by which it counts."""


def wrong_terms(
    values: Values, known: Values, loss: float
) -> tuple[tuple[WrongTerm, ...], set[int]]:
    """The terms that differ, and the values of this rank that they are; none unless another term
    agrees. They add up to `loss`, that of all ranks. Every rank of the world must call this.
    """
    own, theirs = _terms_of_loss(values), _combined(_terms_of_loss(known))
    sums = _combined(own)
    every = [of_rank for of_rank in gathered([(t.line, t.value) for t in sums]) if of_rank]
    lines = {tuple(line for line, _ in of_rank) for of_rank in every}
    if len(lines) != 1 or len(theirs) < 2:
        return (), set()
    means = [fmean(of_rank[i][1] for of_rank in every) for i in range(len(every[0]))]
    # The loss may be the ranks' mean, or their sum, or be divided after the backward pass.
    scale = loss / total if (total := math.fsum(means)) else math.nan
    paired = _paired([scale * one for one in means], [one.value for one in theirs])
    if not paired:
        return (), set()
    here = [i for i in range(len(means)) if i not in paired]
    there = [i for i in range(len(theirs)) if i not in paired.values()]
    if here and there and len(here) != len(there):
        return (), set()
    line = every[0]
    wrong = [
        WrongTerm(
            len(theirs),
            *(("", 0.0) if i is None else (line[i][0], scale * means[i])),
            *(("", 0.0) if j is None else (theirs[j].line, theirs[j].value)),
        )
        for i, j in itertools.zip_longest(here, there)
    ]
    numbers = {one.number for microbatch in own for i, one in enumerate(microbatch) if i in here}
    return tuple(wrong), numbers


def padding_counted(values: Values, padding: Iterable[Tensor]) -> tuple[str, int]:
    """A line outside modules whose mask of tokens has all that one process has, and some of the
    padding, and how many; `padding` says which tokens are that.
    """
    for ((call, line, _), _), own in zip(values.places, values.tensors, strict=True):
        if call or own is None or own.dtype != torch.bool or own.ndim != 2 or own.all():
            continue
        for one in padding:
            columns = one.numel() // len(own)
            if one.numel() % len(own) or own.size(1) > columns:
                continue
            # Of the last tokens, as those of an answer, or without the first, which has no label.
            is_padding = one.view(len(own), columns)[:, -own.size(1) :]
            if own[~is_padding].all() and own[is_padding].any():
                return line, int(own[is_padding].sum())
    return "", 0


def _paired(own: Sequence[float], known: Sequence[float]) -> dict[int, int]:
    """The terms of both sides with one value, each once."""
    found: dict[int, int] = {}
    for i, value in enumerate(own):
        free = (j for j in range(len(known)) if j not in found.values())
        same = [j for j in free if math.isclose(value, known[j], rel_tol=EXPLAINED)]
        if same and value:
            found[i] = same[0]
    return found


def _combined(losses: Sequence[Sequence[_Term]]) -> list[_Term]:
    """The terms, added up over the losses of microbatches."""
    if not losses or any(len(one) != len(losses[0]) for one in losses):
        return []
    return [
        _Term(terms[0].number, terms[0].line, math.fsum(one.value for one in terms))
        for terms in zip(*losses, strict=True)
    ]


def _terms_of_loss(values: Values) -> list[list[_Term]]:
    """For each loss with which a backward pass begins, its terms."""
    arrived, read, begins = values.arrived.keys(), set[int](), set[int]()
    for number, (key, _) in enumerate(values.places):
        read |= {*values.sources[number]} if number in arrived else set()
        begins |= {*values.sources[number]} if operator_of(key) == "ones_like" else set()
    roots = sorted(arrived - read)
    if not begins & {*roots}:
        # The gradient of the loss that a function returns is none that a line computes.
        last = (n for n, own in enumerate(values.with_gradient) if arrived & {*(own or ())})
        roots = [max(last, default=0)] if arrived else []
    found = ((root, values.tensors[root]) for root in roots)
    return [
        list(_split(values, root, 1.0)) for root, one in found if one is not None and one.ndim == 0
    ]


def _split(values: Values, number: int, factor: float) -> Iterator[_Term]:
    """The terms of a value that counts `factor` times."""
    key, given = values.places[number][0], values.numbers[number]
    operator, sources = operator_of(key).strip("_"), values.sources[number]
    graded = [source for source in sources if source in values.arrived]
    other, plain = given.get("other"), given.get("alpha", 1) == 1
    if operator in ("add", "sub") and len(sources) == 2 and plain:
        yield from _split(values, sources[0], factor)
        yield from _split(values, sources[1], -factor if operator == "sub" else factor)
    elif (operator in PASSING and len(sources) == 1) or (operator == "add" and other == 0):
        yield from _split(values, sources[0], factor)
    elif operator == "neg":
        yield from _split(values, sources[0], -factor)
    elif operator in ("mul", "div") and (by := _scale(values, sources, graded, other)):
        yield from _split(values, graded[0], factor * by if operator == "mul" else factor / by)
    elif operator in ("sum", "mean") and (parts := _stacked(values, number)):
        for part in parts:
            yield from _split(values, part, factor / (len(parts) if operator == "mean" else 1))
    elif (one := values.tensors[number]) is not None:
        yield _Term(number, key[1], factor * one.item())


def _scale(
    values: Values, sources: Sequence[int], graded: Sequence[int], other: float | None
) -> float | None:
    """The number by which the only operand with a gradient is multiplied, or divided."""
    if len(graded) != 1 or (graded[0] != sources[0] and len(sources) == 1):
        return None
    rest = [values.tensors[source] for source in sources if source != graded[0]]
    if rest and rest[0] is not None and rest[0].numel() == 1 and graded[0] == sources[0]:
        return float(rest[0].item())
    return None if rest or other is None else float(other)


def _stacked(values: Values, number: int) -> Sequence[int]:
    """The numbers that are put together, and then added up."""
    (source, *_) = (*values.sources[number], -1)
    if source < 0 or operator_of(values.places[source][0]) not in ("stack", "cat"):
        return ()
    parts = values.sources[source]
    own = [values.tensors[part] for part in parts]
    return parts if all(one is not None and one.numel() == 1 for one in own) else ()

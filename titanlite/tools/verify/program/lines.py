"""On a rank: finds the first line of the caller's code that computes something else than on one
process.

A line is found on both sides if both run the same code, as the same loss function or module does.
A value that is a rank's own share is right after a sum or a mean over an axis. A wrong value is
harmless if all that is computed from it next is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.tools.verify.agreement import agreement
from titanlite.tools.verify.evidence import EXPLAINED
from titanlite.tools.verify.program.code_trace import Tracer
from titanlite.tools.verify.program.values import Key, Place, Values, values_file
from titanlite.tools.verify.record import WrongLine
from titanlite.tools.verify.tracing import gathered, sum_over_axes

# No more values are summed.
MOST_SUMS = 48


def first_wrong_line(tracer: Tracer, values: Values, folder: str) -> WrongLine | None:
    """The first value that is wrong on some rank, compared with those that the reference has saved
    in `folder`; every rank of the world must call this.
    """
    known = torch.load(values_file(folder), mmap=True, weights_only=True)
    states = {
        place: state
        for number, place in enumerate(values.places)
        if (state := _state(tracer, values, number, known)) is not None
    }
    wrong: dict[Place, None] = {}
    for of_rank in gathered([place for place, state in states.items() if state != "right"]):
        wrong |= dict.fromkeys(of_rank)
    shares = _shares(tracer, values, known, list(wrong)[:MOST_SUMS])
    return _first(values, states, wrong, shares)


def _state(
    tracer: Tracer, values: Values, number: int, known: Mapping[Key, Sequence[Tensor | None]]
) -> str | None:
    """ "right", "moved" for rows in another order, or "wrong"; None if that cannot be said."""
    found = _pair(values, number, known)
    if found is None:
        return None
    own, whole, share = found
    if not own.ndim or not whole.ndim:
        same = own.shape == whole.shape and share == (0, 1)
        return ("right" if _is_close(tracer, own, whole) else "wrong") if same else None
    is_any = False
    for select in tracer.ways(own, whole, share):
        is_any = True
        if agreement(own, select(whole), whole).difference <= tracer.tolerance:
            return "right"
    if tracer.finds_moved(own, whole, share):
        return "moved"
    return "wrong" if is_any else None


def _is_close(tracer: Tracer, own: Tensor, whole: Tensor) -> bool:
    return agreement(own, whole, whole).difference <= tracer.tolerance


def _pair(
    values: Values, number: int, known: Mapping[Key, Sequence[Tensor | None]]
) -> tuple[Tensor, Tensor, tuple[int, int]] | None:
    """A value, that of one process, and which of how many microbatches it is of."""
    (key, index), own = values.places[number], values.tensors[number]
    others = known.get(key, ())
    if own is None or not others or len(values.of[key]) % len(others):
        return None
    microbatch, place = divmod(index, len(others))
    whole = others[place]
    if whole is None or whole.dtype != own.dtype or not own.numel() or not whole.numel():
        return None
    return own, whole, (microbatch, len(values.of[key]) // len(others))


def _shares(
    tracer: Tracer,
    values: Values,
    known: Mapping[Key, Sequence[Tensor | None]],
    wrong: Sequence[Place],
) -> dict[Place, tuple[str, str]]:
    """The wrong values that are right after a "sum" or a "mean" over an axis, with both."""
    pairs: dict[Place, tuple[Tensor, Tensor]] = {}
    for number, place in enumerate(values.places):
        found = _pair(values, number, known) if place in wrong else None
        if found and found[0].dtype != torch.bool and found[0].shape == found[1].shape:
            pairs[place] = found[:2]
    everyone = gathered({place: tuple(own.shape) for place, (own, _) in pairs.items()})
    num_rows = gathered(0 if tracer.where is None else len(tracer.where.rows))
    shares = {}
    for place in wrong:
        shapes = [of_rank.get(place) for of_rank in everyone]

        def weighted(weight: int, place: Place = place) -> Tensor:
            return pairs[place][0].double() * weight

        of_axes = sum_over_axes(tracer.subject, shapes, lambda: weighted(1))
        # A mean over rows, of which ranks may have different numbers.
        by_rows = sum_over_axes(tracer.subject, shapes, lambda: weighted(num_rows[tracer.rank]))
        for axis, total in of_axes.items():
            group = tracer.subject.groups[axis]
            rows = sum(num_rows[rank] for rank in dist.get_process_group_ranks(group))
            way = _way(total, by_rows[axis], pairs[place][1], tracer.grid.degrees[axis], rows)
            if way and place not in shares:
                shares[place] = way, axis
    return shares


def _way(total: Tensor, by_rows: Tensor, known: Tensor, degree: int, num_rows: int) -> str:
    """How a value of one process follows from sums of the ranks' own; "" if it does not."""
    for way, own, factor in (
        ("sum", total, 1),
        ("mean", total, degree),
        ("mean, weighted by the number of rows,", by_rows, num_rows),
    ):
        if factor and agreement(own / factor, known.double(), known).difference < EXPLAINED:
            return way
    return ""


def _first(
    values: Values,
    states: Mapping[Place, str],
    wrong: Mapping[Place, None],
    shares: Mapping[Place, tuple[str, str]],
) -> WrongLine | None:
    readers: dict[int, list[int]] = defaultdict(list)
    for number, own in enumerate(values.sources):
        for source in own:
            readers[source].append(number)
    harmless: dict[int, bool] = {}
    for number in reversed(range(len(values.places))):
        place, after = values.places[number], readers[number]
        is_right = place in states and place not in wrong
        harmless[number] = is_right or (bool(after) and all(harmless[r] for r in after))
    for number, place in enumerate(values.places):
        if place in wrong and place not in shares and not harmless[number]:
            found = WrongLine(place[0][0], place[0][1], states.get(place) == "moved")
            sources, between = _known_sources(values, states, number)
            found.only_here = tuple(line for line in between if line != found.line)
            for source in sources:
                before = values.places[source]
                if before in wrong and before in shares and not harmless[source]:
                    found.source = before[0][1]
                    found.way, found.axis = shares[before]
            return found
    return None


def _known_sources(
    values: Values, states: Mapping[Place, str], number: int
) -> tuple[list[int], list[str]]:
    """The nearest values with a counterpart from which one is computed, and the lines between."""
    found, stack, seen = [], list(values.sources[number]), set[int]()
    while stack:
        source = stack.pop()
        if source in seen:
            continue
        seen.add(source)
        if values.places[source] in states:
            found.append(source)
        else:
            stack += values.sources[source]
    between = (values.places[s][0][1] for s in sorted(seen - set(found)))
    return found, list(dict.fromkeys(between))

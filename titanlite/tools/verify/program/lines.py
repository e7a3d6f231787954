"""On a rank: finds the first line of the caller's code that computes something else than on one
process.

A line is found on both sides if both run the same code, as the same loss function or module does.
A value that is a rank's own share is right after a reduction over an axis. A wrong value is
harmless if all that is computed from it next is right.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.tools.verify.agreement import agreement, digest_of, without_padding, wrong_places
from titanlite.tools.verify.dataflow import PLACE
from titanlite.tools.verify.evidence import EXPLAINED, WRONG
from titanlite.tools.verify.program.call_contents import ARRANGE
from titanlite.tools.verify.program.code_trace import CodeTracer, find_rows
from titanlite.tools.verify.program.values import RANDOM, Place, Values
from titanlite.tools.verify.record import WrongLine, operator_of
from titanlite.tools.verify.tracing import gathered, sum_over_axes
from titanlite.tools.verify.wording import is_near, listed

# No more values are reduced.
MOST_REDUCED = 48
# Nor does the diagnosis look at more wrong lines.
MOST_LINES = 24

# Operators of which each element of the result is of several.
REDUCTIONS = ("mean", "std", "var", "sum", "amax", "amin", "logsumexp")
CHOOSING = ("argmax", "argmin", "argsort")
# Nor are more elements of a row named.
MOST_ELEMENTS = 8

# Also with padding.
RIGHT = ("right", "padded")
# Arguments that need no name.
UNNAMED = ("self", "other", "value", "exponent")

Pair = tuple[Tensor, Tensor, tuple[int, int]]
"""A value, that of one process, and which of how many microbatches it is of."""


def wrong_lines(
    tracer: CodeTracer,
    values: Values,
    known: Values,
    num_microbatches: int,
    terms: Collection[int] = (),
) -> tuple[tuple[WrongLine, ...], tuple[WrongLine, ...], tuple[str, ...], tuple[WrongLine, ...]]:
    """The first values that are wrong on some rank, beside the reference's, those that the host
    reads though they are shares, what `_without_gradient` finds, and lines that are given other
    numbers; every rank of the world must call this. If `terms` of the loss are known to be wrong,
    only values that are in them.
    """
    others, instead = counterparts_of(values, known, num_microbatches)
    pairs = pairs_of(values, known, others, num_microbatches)
    judged = {values.places[number]: state_of(tracer, *pair) for number, pair in pairs.items()}
    states = {place: state for place, state in judged.items() if state is not None}
    wrong: dict[Place, None] = {}
    unjudged = set[Place]()
    for of_rank in gathered(judged):
        wrong |= dict.fromkeys(p for p, s in of_rank.items() if s not in (None, *RIGHT))
        unjudged |= {place for place, state in of_rank.items() if state is None}
    found = {values.places[number]: pair for number, pair in pairs.items()}
    for place in _in_turn(tracer, {p: found[p] for p in wrong if p in found}):
        wrong.pop(place, None)
        states |= {place: "right"} if place in states else {}
    # All ranks reduce the same values in the same order, first those that a host reads.
    read = {p for of_rank in gathered([values.places[n] for n in values.read]) for p in of_rank}
    some = sorted(wrong, key=lambda place: place not in read)[:MOST_REDUCED]
    shares = shares_of(tracer, {place: found[place] for place in some if place in found}, some)
    rows: dict[Place, str] = {}
    # What depends on no data has the rows of its place, also where others have been moved.
    free = {place for place, is_free in zip(values.places, values.is_free, strict=True) if is_free}
    of_place = [
        p
        for p in some
        if (state := states.get(p)) == "wrong"
        or (state == "moved" and p in free and _is_of_place(found[p][1]))
    ]
    for there in gathered({p: _rows(*found[p]) for p in of_place}):
        rows |= {place: which for place, which in there.items() if which}
    far = {p: _shift(tracer, *pair) for p, pair in found.items() if judged[p] not in RIGHT}
    shifts = {p: by for there in gathered(far) for p, by in there.items() if by}
    at_borders = {p: _border(tracer, *found[p]) for p in some if states.get(p) == "wrong"}
    borders: dict[Place, set[str]] = defaultdict(set)
    for place, which in (one for there in gathered(at_borders) for one in there.items()):
        borders[place].add(which)
    parts = {
        n for n, (own, whole, share) in pairs.items() if own.numel() * share[1] < whole.numel()
    }
    axes = {a: tuple(dist.get_process_group_ranks(g)) for a, g in tracer.subject.groups.items()}
    digests = gathered({p: digest_of(found[p][0]) for p in some if p in found})
    alike = {p for p in some if len({of_rank.get(p) for of_rank in digests}) == 1}
    where = tracer.where
    plain = [1.0, len(where.rows) / where.num_rows / num_microbatches] if where else []
    search = _LineSearch(
        *(values, known, others, instead, states, wrong, unjudged),
        *(shares, rows, shifts, borders),
        *(terms, parts, axes, alike),
        plain=plain,
    )
    lines = tuple(itertools.islice(search.found(), MOST_LINES))
    if not lines:
        # Where none is wrong for certain, one that has other tokens may be.
        lines = tuple(WrongLine(*place[0][:2], shift=by) for place, by in shifts.items())
    numbers = tuple(search.numbers()) if where else ()
    return lines, tuple(search.read()), _without_gradient(values, known, others), numbers


def counterparts_of(
    values: Values, known: Values, num_microbatches: int
) -> tuple[dict[int, int], dict[int, int]]:
    """The values of one process that the same line computes, or the same operator from what
    corresponds, in lines that only one side runs; and those from what corresponds but for one.
    """
    found, instead, free = dict[int, int](), dict[int, int](), defaultdict[Any, list[int]](list)
    outputs = defaultdict[int, list[str]](list)
    for call, number in values.outputs.items():
        outputs[number].append(call)
    for number, (key, _) in enumerate(known.places):
        free[key[::2]] += [number] * (key not in values.of)
    for number, (key, index) in enumerate(values.places):
        own = {found.get(source, -1) for source in values.sources[number]}
        if same := known.of.get(key):
            if len(values.of[key]) in (len(same), num_microbatches * len(same)):
                found[number] = same[index % len(same)]
        elif "detach" in key[2] and -1 not in own and own:
            (found[number],) = own
        for other in free[key[::2]] if -1 not in own and not same else ():
            theirs = set(known.sources[other])
            if own == theirs:
                found[number] = other
                free[key[::2]].remove(other)
                break
            if len(own) == len(theirs) == len(own & theirs) + 1 > 1:
                instead[number] = other
        for call in outputs.get(number, ()):
            if number not in found and call in known.outputs:
                found[number] = known.outputs[call]
    taken = set(found.values())
    for number, other in sorted(found.items(), reverse=True):
        # The last operands without a counterpart, of lines that only one side runs.
        here = [one for one in values.sources[number] if one not in found]
        there = [one for one in known.sources[other] if one not in taken]
        is_new = all(one not in instead and values.places[one][0] not in known.of for one in here)
        if len(here) == len(there) == 1 and is_new:
            found[here[0]] = there[0]
            taken.add(there[0])
    return found, {n: o for n, o in instead.items() if n not in found and o not in found.values()}


def _without_gradient(values: Values, known: Values, others: Mapping[int, int]) -> tuple[str, ...]:
    """A call, its line whose result has a gradient on one process alone, and what reads it."""
    for number, with_gradient in enumerate(values.with_gradient):
        there = known.with_gradient[others[number]] if number in others else None
        for source in values.sources[number] if with_gradient is not None else ():
            if source not in (with_gradient or ()) and others.get(source) in (there or ()):
                return *values.places[source][0][:2], values.places[number][0][1]
    return ()


def pairs_of(
    values: Values,
    known: Values,
    counterparts: Mapping[int, int],
    num_microbatches: int,
    *,
    of_gradients: bool = False,
) -> dict[int, Pair]:
    """The values that have a counterpart to compare with, by number, or their gradients."""
    pairs = {}
    here, there = (
        one.gradients if of_gradients else dict(enumerate(one.tensors)) for one in (values, known)
    )
    for number, (key, index) in enumerate(values.places):
        own, others, all_own = here.get(number), known.of.get(key, []), len(values.of[key])
        if not others and number in counterparts and num_microbatches == 1:
            others, all_own, index = [counterparts[number]], 1, 0
        counts = len(others), num_microbatches * len(others)
        if own is None or not others or all_own not in counts:
            continue
        microbatch, place = divmod(index, len(others))
        whole, count = there.get(others[place]), all_own // len(others)
        if not own.ndim and count > 1:
            # Numbers have no part of their own for a microbatch: all of them are taken together.
            of_all = [here.get(n) for n in values.of[key][place :: len(others)]]
            if microbatch < count - 1 or None in of_all or of_gradients:
                continue
            own = torch.stack([one for one in of_all if one is not None]).sum()
        if whole is not None and whole.dtype == own.dtype and own.numel() and whole.numel():
            pairs[number] = own, whole, (microbatch, count)
    return pairs


def state_of(tracer: CodeTracer, own: Tensor, whole: Tensor, share: tuple[int, int]) -> str | None:
    """Whether a value is one of RIGHT, has "moved" rows, or "chosen" ones, of which no part of
    the reference's has the shape, or is "wrong"; None if that is unknown.
    """
    if not own.ndim or not whole.ndim:
        if own.shape != whole.shape:
            return None
        return "right" if share == (0, 1) and _is_close(tracer, own, whole, whole) else "wrong"
    is_any = False
    for select in tracer.ways(own, whole, share):
        is_any, part = True, select(whole)
        if _is_close(tracer, own, part, whole):
            return "right" if part.shape == own.shape else "padded"
    if own.ndim == whole.ndim + 1 and own.is_floating_point():
        return "wrong"
    is_moved = tracer.finds_moved(own, whole, share)
    if is_moved is False:
        is_moved = tracer.in_known_order(own, whole)
    if is_moved is None:
        return None
    if is_moved:
        return "moved" if is_any else "chosen"
    return "wrong" if is_any else None


def _is_close(tracer: CodeTracer, own: Tensor, part: Tensor, whole: Tensor) -> bool:
    if torch.equal(own, part):
        return True
    # Infinities are equal, but have no difference.
    if own.shape == part.shape and torch.equal(at := own.isinf(), part.isinf()) and at.any():
        own, part = own.where(~at, 0), part.where(~at, 0)
    return agreement(without_padding(own, part), part, whole).difference <= tracer.tolerance


def _in_turn(tracer: CodeTracer, pairs: Mapping[Place, Pair]) -> list[Place]:
    """The values of which the ranks along an axis have one part after the other, as many rows as
    each chooses, such as those of a mask.
    """
    own = {place: len(one) for place, (one, *_) in pairs.items() if one.ndim}
    sizes, is_right = gathered(own), dict[Place, bool]()
    for place in own:
        one, whole, share = pairs[place]
        for group in tracer.subject.groups.values():
            ranks = dist.get_process_group_ranks(group)
            number = [sizes[rank].get(place, 0) for rank in ranks]
            if whole.ndim == one.ndim and sum(number) == len(whole) and share == (0, 1):
                part = whole.split(number)[ranks.index(tracer.rank)]
                is_right[place] = part.shape == one.shape and _is_close(tracer, one, part, whole)
    everyone = list(zip(gathered(is_right), sizes, strict=True))
    return [
        place
        for place in dict.fromkeys(itertools.chain(*sizes))
        if all(right.get(place) for right, of_rank in everyone if place in of_rank)
    ]


def _rows(own: Tensor, whole: Tensor, share: tuple[int, int]) -> str:
    """The rows of one process that a value has, in their order, but should not; "" for none."""
    _, count = share
    # A constant, such as a mask of zeros, is nobody's.
    if not own.ndim or own.shape[1:] != whole.shape[1:] or (own == own.flatten()[0]).all():
        return ""
    for first in range(len(whole) - len(own) + 1):
        if torch.equal(own, whole[first : first + len(own)]):
            of = "another microbatch" if count > 1 else "one process, which are not this rank's"
            return f"rows {first} to {first + len(own) - 1} of {of}"
    return ""


def _is_of_place(rows: Tensor) -> bool:
    """Whether rows say which they are: no two are equal, as in many masks, nor are they numbers."""
    return rows.ndim > 1 and len(rows.unique(dim=0)) == len(rows)


def _shift(tracer: CodeTracer, own: Tensor, whole: Tensor, share: tuple[int, int]) -> int:
    """How much further on than this rank's tokens the integers are that a value has; 0 if unknown.

    After a shift of labels, which are those of the next token, as after any, a few are missing.
    """
    where = tracer.where
    is_whole = share == (0, 1) and own.ndim == whole.ndim > 1
    if where is None or not is_whole or own.is_floating_point():
        return 0
    if len(where.columns) == where.num_columns:
        # The code itself may cut the sequence.
        return 0
    known = whole[where.rows] if len(whole) == where.num_rows else whole
    is_part = own.shape[2:] == known.shape[2:] and 1 < own.size(1) < known.size(1)
    if not is_part or len(own) != len(known) or (own == own.flatten()[0]).all():
        return 0
    blocks = known.unfold(1, own.size(1), 1).movedim(-1, 2).movedim(1, 0)
    same = [first for first, one in enumerate(blocks) if torch.equal(one, own)]
    return same[0] - int(where.columns[0]) if len(same) == 1 else 0


def _border(tracer: CodeTracer, own: Tensor, whole: Tensor, share: tuple[int, int]) -> str:
    """Where a part differs, if that is only where it "begins", or "ends"; or ""."""
    for select in tracer.ways(own, whole, share):
        part = select(whole)
        at = PLACE.match(wrong_places(own, part, WRONG * part.double().abs().max().item()))
        if at and int(at[3]) > 1 and own.size(int(at[4])) < whole.size(int(at[4])):
            return "begins" if at[1] == "0" else "ends" * (int(at[2] or at[1]) == int(at[3]) - 1)
    return ""


def shares_of(
    tracer: CodeTracer, pairs: Mapping[Place, Pair], wrong: Sequence[Place]
) -> dict[Place, str]:
    """The wrong values that are right after a reduction, and which."""
    shapes = gathered(
        {
            place: tuple(own.shape)
            for place, (own, whole, _) in pairs.items()
            if own.dtype != torch.bool
            and not own.is_complex()
            and own.shape == whole.shape
            # Which element is the largest is no sum of anything.
            and (own.is_floating_point() or operator_of(place[0]) not in CHOOSING)
        }
    )
    num_rows = gathered(0 if tracer.where is None else len(tracer.where.rows))
    shares: dict[Place, str] = {}
    for place in wrong:
        of_ranks = [of_rank.get(place) for of_rank in shapes]

        def scaled(factor: int, place: Place = place) -> Tensor:
            return pairs[place][0].double() * factor

        sums, lowest, highest = (
            sum_over_axes(tracer.subject, of_ranks, lambda: scaled(1), operator)
            for operator in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
        )
        over_two = dict[str, Tensor]()
        if None not in of_ranks and len(set(of_ranks)) == 1:
            for one, two in itertools.combinations(sums, 2):
                both = sum_over_axes(tracer.subject, of_ranks, sums[one].clone)
                over_two[_sum_over(one, two)] = both[two]
        # A mean over rows, of which ranks may have different numbers.
        by_rows = sum_over_axes(tracer.subject, of_ranks, lambda: scaled(num_rows[tracer.rank]))
        ways: dict[str, Tensor] = {}
        for axis, total in sums.items():
            ranks = dist.get_process_group_ranks(tracer.subject.groups[axis])
            rows = sum(num_rows[rank] for rank in ranks)
            ways |= {
                _sum_over(axis): total,
                f"the mean over {axis}": total / len(ranks),
                f"the mean over {axis}, weighted by the number of rows,": by_rows[axis]
                / max(1, rows),
                f"the minimum over {axis}": lowest[axis],
                f"the maximum over {axis}": highest[axis],
            }
        ways |= over_two
        if place not in pairs or pairs[place][0].is_complex():
            continue
        own, whole, (_, count) = pairs[place]
        if own.ndim == whole.ndim + 1:
            # What the ranks have beside each other.
            own = own.double()
            ways = {f"the sum over its dimension {dim}": own.sum(dim) for dim in range(own.ndim)}
            ways |= {f"the mean over its dimension {d}": own.mean(d) for d in range(own.ndim)}
            ways = {way: one for way, one in ways.items() if one.shape == whole.shape}
        elif not own.ndim and count > 1:
            ways = {"": own.double()} | ways
            ways = {
                f"the {how} over the microbatches{f' and {way}' * bool(way)}": total / number
                for how, number in (("sum", 1), ("mean", count))
                for way, total in ways.items()
            }
        equal = own.double() == whole.double() if own.shape == whole.shape else own.new_ones(1)
        # What one rank alone has right, such as places counted from its first, is not reduced.
        of_one_rank = equal.numel() > 1 and (bool(equal.all()) or not equal.any())
        for way, reduced in ways.items():
            if of_one_rank and "imum over" in way:
                continue
            if agreement(reduced, whole.double(), whole.double()).difference < EXPLAINED:
                shares.setdefault(place, way)
    return shares


@dataclass
class _LineSearch:
    """Values with their states, and those that are wrong on some rank."""

    values: Values
    known: Values
    others: Mapping[int, int]
    instead: Mapping[int, int]
    """What `counterparts_of` finds."""
    states: Mapping[Place, str]
    wrong: Mapping[Place, None]
    unjudged: Collection[Place]
    """Those of which some rank cannot say that."""
    shares: Mapping[Place, str]
    rows: Mapping[Place, str]
    """Those that have rows of one process that are not the rank's, and which."""
    shifts: Mapping[Place, int]
    """What `_shift` finds on some rank."""
    borders: Mapping[Place, set[str]]
    """What `_border` finds on the ranks."""
    terms: Collection[int]
    """The values that are wrong terms of the loss, if others are right."""
    parts: Collection[int]
    """The values of which this rank has only a part."""
    axes: Mapping[str, Sequence[int]]
    """The ranks along each axis."""
    alike: Collection[Place]
    """The values that are equal on all ranks."""
    plain: Collection[float]
    """The share of all samples that a rank, or a microbatch, has."""

    def found(self) -> Iterator[WrongLine]:
        """The wrong values that are no shares, nor harmless, nor parts that new code completes.

        What depends on no data comes last: a rank may count from 0 what is counted on from there.
        """
        harmless, free, joined = self._harmless(), self.values.is_free, self._joined()
        reached = self._part_of_the_loss(harmless)
        numbers = sorted(range(len(free)), key=free.__getitem__)
        for number in dict.fromkeys(map(self._place_of, numbers)):
            place = self.values.places[number]
            (call, line, operator), state = place[0], self.states.get(place)
            if number in self.instead and not harmless[number]:
                own = {self.others[source]: source for source in self.values.sources[number]}
                theirs = set(self.known.sources[self.instead[number]])
                here, there = own[min(own.keys() - theirs)], min(theirs - own.keys())
                read = self.values.places[here], self.known.places[there]
                yield WrongLine(call, line, instead=tuple(key[1] for key, _ in read))
            if place not in self.wrong or place in self.shares or harmless[number]:
                continue
            if number in joined or (number not in reached and self._is_beside(number, harmless)):
                continue
            if (state == "chosen" or self._reshapes(number)) and any(
                other[0][:2] == (call, line) and other not in self.shares and not harmless[n]
                for n, other in enumerate(self.values.places)
                if n > number and other in self.wrong and self.states.get(other) != "chosen"
            ):
                continue
            found = WrongLine(call, line, state in ("moved", "chosen"))
            found.rows = self.rows.get(place, "")
            of_line = (by for p, by in self.shifts.items() if p[0][:2] == (call, line))
            found.shift = next(of_line, 0)
            # The rank's part of a value inside the line may have another size.
            ends = (own for other, own in self.borders.items() if other[0][:2] == (call, line))
            found.border = next(("".join(own) for own in ends if len(own) == 1), "")
            found.arranges = self._arranges(number)
            sources, between = self._sources(self.values, number)
            found.only_here = _lines_of(self.values, between, {found.line})
            self._compare(found, number, between)
            # Without a source, it reads the rank's samples or its weights.
            found.is_of_part = self.values.mixes[number] and (
                not sources
                or any(s in self.parts and self.values.places[s] not in self.wrong for s in sources)
            )
            # What only this code runs may be completed later, unless it says what is missing.
            if place[0] not in self.known.of and not (
                found.numbers or found.rows or (found.is_of_part and not _only_arranges(operator))
            ):
                continue
            found.is_of_padded = self.values.mixes[number] and any(
                self.states.get(self.values.places[source]) == "padded" for source in sources
            )
            # A collective between the two may be the reduction.
            is_reduced = not self.values.exchanged.keys().isdisjoint([*between, *sources])
            shares = [s for s in sources if self._is_open_share(s, harmless)]
            shares = [] if is_reduced else shares
            # Another number of the same line says more than that it is given a mean of own rows.
            if found.numbers and all("mean" in self.shares[self.values.places[s]] for s in shares):
                shares = []
            elsewhere = [s for s in shares if self.values.places[s][0][1] != found.line]
            share = next(iter(elsewhere or shares), self._read_as(found.numbers))
            found.is_alike = share is not None and self._is_mean(share)
            self._follow(found, share, () if found.is_alike else shares, harmless)
            if shares and operator_of(place[0]).strip("_") == "add":
                found.summed_by = self._sent_by(number)
            yield found

    def _place_of(self, number: int) -> int:
        """The value with rows of another rank's place from which, alone, a wrong one follows; or
        that one itself.
        """
        while self.values.places[number] in self.wrong:
            sources, _ = self._sources(self.values, number)
            wrong = [s for s in sources if self.values.places[s] in self.wrong]
            own = self.values.tensors[wrong[0]] if len(wrong) == 1 else None
            # A rank may count its rows from 0.
            if own is None or own.ndim < 2 or self.values.places[wrong[0]] not in self.rows:
                break
            (number,) = wrong
        return number

    def read(self) -> Iterator[WrongLine]:
        """The lines that read a share as a number."""
        harmless = self._harmless()
        for number, line in self.values.read.items():
            place = self.values.places[number]
            if place in self.wrong and place in self.shares:
                self._follow(found := WrongLine(place[0][0], line), number, (), harmless)
                yield found

    def _read_as(self, numbers: Sequence[tuple[str, float, float]]) -> int | None:
        """The share that the host has read as a number which the line is given; None for none."""
        for number in self.values.read:
            own, other = self.values.tensors[number], self.others.get(number)
            whole = None if other is None else self.known.tensors[other]
            if self.values.places[number] in self.shares and own is not None and whole is not None:
                both = own.item(), whole.item()
                if any(one[1:] == both for one in numbers):
                    return number
        return None

    def _follow(
        self,
        found: WrongLine,
        share: int | None,
        shares: Collection[int],
        harmless: Mapping[int, bool],
    ) -> None:
        """Note where the reduction of a share belongs: at the first of a chain of them."""
        while share is not None:
            before = self.values.places[share]
            found.source, found.way = before[0][1], self.shares[before]
            ways = ((p[0][1], self.shares[p]) for p in map(self.values.places.__getitem__, shares))
            found.mixed = next((one for one in ways if one[1] != found.way), None)
            sources, between = self._sources(self.values, share)
            share = next((s for s in sources if self._is_open_share(s, harmless)), None)
            if share is not None:
                found.too_narrow = found.too_narrow or self._too_narrow(share, between)

    def _sent_by(self, number: int) -> str:
        """The line that sends a value, or a copy of it; "" for none."""
        for sent, (line, _) in self.values.exchanged.items():
            while sent != number and len(self.values.sources[sent]) == 1:
                if not _only_arranges(self.values.places[sent][0][2]):
                    break
                (sent,) = self.values.sources[sent]
            if sent == number:
                return line
        return ""

    def _reshapes(self, number: int) -> bool:
        """Whether a value has the elements of one that is right, in their order."""
        operator = self.values.places[number][0][2].split(".")[1]
        sources = [self.states.get(self.values.places[one]) for one in self.values.sources[number]]
        return operator in ("view", "_unsafe_view") and all(state in RIGHT for state in sources)

    def _arranges(self, number: int) -> tuple[str, ...]:
        """The modules inside the call of a value whose results it has, if it only arranges them."""
        calls, stack = dict[str, None](), [number]
        own = self.values.places[number][0][0]
        while stack:
            (call, _, operator), _ = self.values.places[one := stack.pop()]
            if call != own:
                calls[call] = None
            elif not _only_arranges(operator):
                return ()
            else:
                stack += self.values.sources[one]
        return tuple(calls)

    def _too_narrow(self, share: int, between: Sequence[int]) -> tuple[str, ...]:
        """The line and the axis of what reduces a share, which needs a sum over another, too."""
        through = self.values.exchanged
        for line, ranks in (through[one] for one in [share, *between] if one in through):
            for axis, other in itertools.permutations(self.axes, 2):
                both = _sum_over(axis, other), _sum_over(other, axis)
                if self.axes[axis] == ranks and self.shares[self.values.places[share]] in both:
                    return line, axis
        return ()

    def _is_open_share(self, number: int, harmless: Mapping[int, bool]) -> bool:
        place = self.values.places[number]
        return place in self.wrong and place in self.shares and not harmless[number]

    def _is_mean(self, number: int) -> bool:
        """Whether a share is a mean, of which one process has the sum: it follows from one that is
        exchanged, and all ranks have the same.
        """
        way = self.shares.get(self.values.places[number], "")
        is_sum = way.startswith("the sum over") and "its dimension" not in way
        if not is_sum or self.values.places[number] not in self.alike:
            return False
        stack, seen = [number], set[int]()
        while stack:
            one = stack.pop()
            if one in self.values.exchanged:
                return True
            seen.add(one)
            for source in self.values.sources[one]:
                place = self.values.places[source]
                is_open = place in self.shares or place not in self.states
                stack += [source] * (is_open and source not in seen)
        return False

    def _readers(self) -> dict[int, list[int]]:
        """The values that are computed from each."""
        readers: dict[int, list[int]] = defaultdict(list)
        for number, own in enumerate(self.values.sources):
            for source in own:
                readers[source].append(number)
        return readers

    def _part_of_the_loss(self, harmless: Mapping[int, bool]) -> set[int]:
        """The values that are wrong, and part of what a backward pass begins with, or of its wrong
        terms, by others that are wrong.
        """
        readers, arrived, found = self._readers(), self.values.arrived.keys(), set[int]()
        for number in reversed(range(len(self.values.places))):
            begins = number in arrived and arrived.isdisjoint(readers[number])
            begins = number in self.terms if self.terms else begins
            if not harmless[number] and (begins or not found.isdisjoint(readers[number])):
                found.add(number)
        return found

    def _is_beside(self, number: int, harmless: Mapping[int, bool]) -> bool:
        """Whether a value that is no part of the loss is not the cause: if other terms are wrong,
        or by an index that chooses what the code of a module runs, which returns what is right.
        """
        own = self.values.tensors[number]
        returned = self.values.outputs.get(self.values.places[number][0][0])
        is_index = own is not None and not own.is_floating_point()
        is_index = is_index and returned is not None and harmless[returned]
        return bool(self.values.arrived) and (is_index or bool(self.terms))

    def _harmless(self) -> dict[int, bool]:
        readers = self._readers()
        known, harmless = self.states.keys() - self.unjudged, dict[int, bool]()
        for number in reversed(range(len(self.values.places))):
            place, after = self.values.places[number], readers[number]
            is_right = place in known and place not in self.wrong
            is_right = is_right or (not after and self.values.is_unused(number))
            harmless[number] = is_right or (bool(after) and all(harmless[r] for r in after))
        return harmless

    def _joined(self) -> set[int]:
        """Values in another order, as is right: a line of both sides joins the rank's own parts, of
        several tensors, and what is computed from that row by row.
        """
        found = set[int]()
        for number, own in enumerate(self.values.sources):
            key = self.values.places[number][0]
            if self.states.get(self.values.places[number]) not in ("moved", "chosen"):
                continue
            is_right = all(
                source in found or self.states.get(self.values.places[source]) in RIGHT
                for source in own
            )
            joins = operator_of(key) in ("cat", "stack") and key in self.known.of
            if is_right and (joins or any(source in found for source in own)):
                found.add(number)
        return found

    def _compare(self, found: WrongLine, number: int, here: Sequence[int]) -> None:
        """What the wrong line is given, and reads, on one process, if that is something else."""
        (key, _), other = self.values.places[number], self.others.get(number)
        if other is None:
            return
        operator = key[2].split(".")[1].strip("_")
        found.is_random = operator.startswith(RANDOM)
        found.is_causal = bool(self.values.numbers[number].get("is_causal"))
        found.numbers = self._numbers(number, other)
        own, whole = self.values.tensors[number], self.known.tensors[other]
        if self._reshapes(number) and own is not None and whole is not None:
            size, known = own.shape[-1], whole.shape[-1]
            found.numbers += (("pieces of size", size, known),) * (size != known)
        ran = {key[1] for key in self.values.of}
        both = [*zip(self.values.operands(number), self.known.operands(other), strict=False)]
        found.order = next(filter(None, itertools.starmap(_order, both)), "")
        if (index := _of_other_rows(both)) is not None and self.values.sources[number]:
            found.unlike = self.values.places[self.values.sources[number][index]][0][1]
        _, between = self._sources(self.known, other)
        found.over = self._reduced_over(here, between) if found.only_here else ""
        found.never_here = _lines_of(self.known, between, ran)

    def _reduced_over(self, here: Sequence[int], there: Sequence[int]) -> str:
        """Over how many elements both sides take a mean, or the like, if over others; or "".

        A part of the batch explains fewer of them.
        """
        own, theirs = _counts(self.values, here), _counts(self.known, there)
        found = (
            f"{name} over {listed(sorted(own[name]), 4)} elements, on one process over "
            f"{listed(sorted(theirs[name]), 4)}"
            for name in REDUCTIONS
            if name in own
            and name in theirs
            and not own[name] & theirs[name]
            and not any(
                is_near(one, other * share)
                for one in own[name]
                for other in theirs[name]
                for share in self.plain
            )
        )
        return next(found, "")

    def _numbers(self, number: int, other: int) -> tuple[tuple[str, float, float], ...]:
        """The numbers that an operator is given, beside others on one process."""
        own, operator = self.values.numbers[number], operator_of(self.values.places[number][0])
        return tuple(
            (f"{operator.strip('_')} with" + f" {name} =" * (name not in UNNAMED), own[name], value)
            for name, value in self.known.numbers[other].items()
            if name in own and own[name] != value
        )

    def numbers(self) -> Iterator[WrongLine]:
        """The lines outside modules that are given other numbers than on one process, whatever
        else is right; not one that is `plain` times as large, as a number of samples is.
        """
        for number, other in self.others.items():
            place = self.values.places[number][0]
            if place[2] == self.known.places[other][0][2] and not place[0]:
                for one in self._numbers(number, other):
                    if not any(is_near(one[1], one[2] * factor) for factor in self.plain):
                        yield WrongLine(*place[:2], numbers=(one,))

    def _sources(self, values: Values, number: int) -> tuple[list[int], list[int]]:
        """The nearest values with a counterpart from which one is computed, and those between."""
        found, stack, seen = [], list(values.sources[number]), set[int]()
        while stack:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            place = values.places[source]
            is_right = place not in self.wrong or place in self.shares
            # What is wrong in a line that only this code runs is so for what that reads.
            if place in self.states and (is_right or place[0] in self.known.of):
                found.append(source)
            else:
                stack += values.sources[source]
        in_lines_of_both = sorted(found, key=lambda s: values.places[s][0] not in self.known.of)
        return in_lines_of_both, sorted(seen - set(found))


def _counts(values: Values, numbers: Sequence[int]) -> dict[str, set[int]]:
    """For each operator like a mean among some values, of how many elements each of its own is."""
    found: dict[str, set[int]] = defaultdict(set)
    for number in numbers:
        name = operator_of(values.places[number][0]).strip("_")
        (source, *_) = (*values.operands(number), None)
        own = values.tensors[number]
        if name in REDUCTIONS and source is not None and own is not None and own.numel():
            found[name].add(source.numel() // own.numel())
    return found


def _order(own: Tensor | None, known: Tensor | None) -> str:
    """How a tensor has the elements of another in another order; "" if it does not."""
    if own is None or known is None or own.shape != known.shape or own.ndim < 2:
        return ""
    if torch.equal(own, known) or not own.is_floating_point():
        return ""
    values, places = known.flatten().sort()
    if not torch.equal(values, own.flatten().sort().values) or not values.diff().all():
        return ""
    row = places[torch.searchsorted(values, own[0].flatten())][:MOST_ELEMENTS].tolist()
    more = " and more" * (own[0].numel() > len(row))
    return (
        f"in another order: its first row has the elements {', '.join(map(str, row))}{more} of that"
    )


def _of_other_rows(operands: Sequence[tuple[Tensor | None, Tensor | None]]) -> int | None:
    """Which operand has integers of other rows of one process than the numbers used with them."""
    rows = None
    of_both = [
        (own.flatten(0, -2), known.flatten(0, -2), index)
        for index, (own, known) in enumerate(operands)
        if own is not None and known is not None and own.ndim > 1 and known.ndim > 1
    ]
    for own, known, index in sorted(of_both, key=lambda one: not one[0].is_floating_point()):
        if own.size(1) != known.size(1) or not own.numel() or not known.numel():
            continue
        if own.is_floating_point():
            rows = find_rows(own, known, WRONG * known.abs().max().item())
            rows = rows if rows is not None and (rows >= 0).all() else None
        elif rows is not None and len(own) == len(rows) and not torch.equal(own, known[rows]):
            return index
    return None


def _sum_over(*axes: str) -> str:
    return f"the sum over {' and '.join(axes)}"


def _only_arranges(operator: str) -> bool:
    return operator.split(".")[1].split(":")[-1] in ARRANGE


def _lines_of(values: Values, numbers: Sequence[int], without: Collection[str]) -> tuple[str, ...]:
    """The lines of some values, each once."""
    lines = dict.fromkeys(values.places[number][0][1] for number in numbers)
    return tuple(line for line in lines if line not in without)

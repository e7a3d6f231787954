"""What a parallel step sends and reads, and what of it was needless; torch-free.

Needless is only what the ranks have seen to be (watching.py): a tensor that is sent again while
nothing has changed it, the sum of a gradient taken in each of several backward passes, a reduction
of what all ranks already hold alike, and data that is received and never read. Programs that send
again to save memory, as FSDP2 does before the backward pass, do none of these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from titanlite.quantities import format_bytes

# Needless bytes that are a smaller share than this of what a step sends over an axis say nothing.
LEAST_SHARE = 0.05
# What is read of the device in this library's own lines, or another's, is not the caller's doing.
OTHERS = ("titanlite/", "models/")
SITE_PACKAGES = "site-packages"


class Sent(NamedTuple):
    """A collective or message as one rank called it.

    `num_bytes` are those of its whole tensor: the output of a gather, the input of the others.
    """

    kind: str
    axis: str
    ranks: tuple[int, ...]
    num_bytes: int
    what: str
    """The shape and dtype of its input."""
    site: str
    in_backward: int = 0
    """The number of the backward pass that has begun last, counted from 1; 0 before the first."""
    gradient: str = ""
    """The parameter or FSDP unit whose gradients are complete."""
    digest: str = ""
    """Of the input of a reduction or a gather that is worth it."""
    is_again: bool = False
    """Whether it sends a tensor that was sent before and has not changed."""


class Read(NamedTuple):
    """What the host reads of the device in the middle of a step: it waits for all before it."""

    operation: str
    site: str


@dataclass
class Traffic:
    """What one rank sent in one step, in order, and what it read."""

    sent: tuple[Sent, ...] = ()
    reads: tuple[Read, ...] = ()
    unread: tuple[int, ...] = ()
    """The indices in `sent` of what has arrived and was gone before any operator read it."""
    lost: tuple[tuple[str, str], ...] = ()
    """The lines that bring some of these, with those that overwrite it."""
    changed: tuple[tuple[str, str], ...] = ()
    """Lines that read what is there no more, with the lines that have overwritten it."""
    part: str = ""
    """A digest of the rank's part of the batch."""
    num_of_gradients: int = 0
    """How many of `sent` come before clipping, of code that is no job."""

    @property
    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(kind, axis) -> the number of calls and their bytes."""
        found: dict[tuple[str, str], tuple[int, int]] = {}
        for one in self.sent:
            count, size = found.get((one.kind, one.axis), (0, 0))
            found[one.kind, one.axis] = count + 1, size + one.num_bytes
        return dict(sorted(found.items()))


class Needless(NamedTuple):
    """Calls of one line over one axis that a step can do without, on the rank with the most."""

    call: Sent
    why: str
    num_calls: int
    num_bytes: int


def notes_on(traffic: Sequence[Traffic]) -> list[str]:
    """Sentences about needless communication and reads, given what each rank sent."""
    return [*_needless_sentences(traffic), *_read_sentences(traffic)]


def _needless_sentences(traffic: Sequence[Traffic]) -> Iterator[str]:
    most: dict[tuple[str, str, str, str], Needless] = {}
    alike = _alike(traffic)
    for rank, own in enumerate(traffic):
        for one in _needless_of(own, alike[rank]):
            key = one.call.kind, one.call.axis, one.call.site, one.why
            if key not in most or one.num_bytes > most[key].num_bytes:
                most[key] = one
    by_axis: dict[str, list[Needless]] = defaultdict(list)
    for one in most.values():
        by_axis[one.call.axis].append(one)
    for axis, found in by_axis.items():
        total = max(sum(s.num_bytes for s in own.sent if s.axis == axis) for own in traffic)
        spared = min(total, sum(one.num_bytes for one in found))
        if spared < LEAST_SHARE * total:
            continue
        times = f"{total / (total - spared):.3g} times" if spared < total else "all of"
        lines = [_describe(one) for one in sorted(found, key=lambda one: -one.num_bytes)[:3]]
        yield (
            f"communicates {times} what it must over {axis}: {'; '.join(lines)}. That is "
            f"{format_bytes(spared)} of {format_bytes(total)} in a step"
        )


def _describe(one: Needless) -> str:
    at = f" at {one.call.site}" if one.call.site else ""
    return f"{one.call.kind} of {one.call.what}{at} {one.why} ({one.num_calls} needless calls)"


def _needless_of(own: Traffic, alike: frozenset[int]) -> Iterator[Needless]:
    """What one rank need not have sent; a call is named for one reason only."""
    seen: set[int] = set()

    def named(indices: Iterable[int], why: str) -> Iterator[Needless]:
        by_line: dict[tuple[str, str, str], list[Sent]] = defaultdict(list)
        for index in indices:
            if index not in seen:
                seen.add(index)
                one = own.sent[index]
                by_line[one.kind, one.axis, one.site].append(one)
        for calls in by_line.values():
            largest = max(calls, key=lambda call: call.num_bytes)
            yield Needless(largest, why, len(calls), sum(call.num_bytes for call in calls))

    yield from named(
        (index for index, one in enumerate(own.sent) if one.is_again),
        "sends a tensor that was sent before in this step and has not changed",
    )
    for passes, indices in _repeated_sums(own.sent).items():
        yield from named(
            indices,
            f"sums the same gradients in each of {passes} backward passes: add them up on each "
            "rank, and reduce once, after the last",
        )
    yield from named(alike, "reduces or gathers what all its ranks already hold alike")
    yield from named(own.unread, "brings what no operator reads before it is gone")


def _repeated_sums(sent: Sequence[Sent]) -> dict[int, list[int]]:
    """Number of backward passes -> the all-reduces of gradients in all of them but the last."""
    by_gradient: dict[tuple[str, str, str, str], dict[int, list[int]]] = {}
    for index, one in enumerate(sent):
        if one.kind == "all_reduce" and one.gradient:
            key = one.axis, one.gradient, one.what, one.site
            by_gradient.setdefault(key, defaultdict(list))[one.in_backward].append(index)
    found: dict[int, list[int]] = defaultdict(list)
    for by_pass in by_gradient.values():
        for number in sorted(by_pass)[:-1]:
            found[len(by_pass)] += by_pass[number]
    return found


def _alike(traffic: Sequence[Traffic]) -> list[frozenset[int]]:
    """For each rank the indices of calls to which every rank of the group gives the same bits."""
    found: list[set[int]] = [set() for _ in traffic]
    members = {one.ranks for own in traffic for one in own.sent if one.digest}
    for ranks in members:
        if len(ranks) < 2 or ranks[-1] >= len(traffic):
            continue
        calls = [
            [
                (i, one)
                for i, one in enumerate(traffic[rank].sent)
                if one.ranks == ranks and one.kind in ("all_reduce", "all_gather")
            ]
            for rank in ranks
        ]
        same_part = len({traffic[rank].part for rank in ranks}) == 1
        for row in zip(*calls, strict=False):
            digests = {one.digest for _, one in row}
            kinds = {(one.kind, one.what) for _, one in row}
            # Gradients of one batch are alike on all its ranks; a test may give them all the same.
            is_reported = len(digests) == len(kinds) == 1 and not (same_part and row[0][1].gradient)
            if is_reported and digests != {""}:
                for rank, (index, _) in zip(ranks, row, strict=True):
                    found[rank].add(index)
    return [frozenset(own) for own in found]


def _read_sentences(traffic: Sequence[Traffic]) -> Iterator[str]:
    """What the caller's own lines read of the device before the last backward pass ends."""
    counts: dict[Read, int] = {}
    for own in traffic:
        of_rank: dict[Read, int] = defaultdict(int)
        for read in own.reads:
            of_rank[read] += 1
        for read, count in of_rank.items():
            counts[read] = max(counts.get(read, 0), count)
    if reported := {read: n for read, n in counts.items() if _is_callers(read.site)}:
        lines = [f"{read.operation} at {read.site}, {n} times" for read, n in reported.items()]
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        yield (
            f"reads the device {sum(reported.values())} times in the middle of a step, and each "
            f"time waits until all before it is computed: {'; '.join(lines[:3])}{more}"
        )


def _is_callers(site: str) -> bool:
    return bool(site) and not site.startswith(OTHERS) and SITE_PACKAGES not in site

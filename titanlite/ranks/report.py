"""The hang report: which rank waits in which collective, and for which rank; torch-free.

Each rank numbers the collectives of a group in the order of its calls. If others wait in a number
that a rank has not reached, it is missing there. If the operation, size or dtype at a number
differs between ranks, they diverged there. write_report makes the report; find_astray finds the
first number at which ranks diverged.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanlite.errors import number_ranks

# Collectives whose sizes may differ between ranks: the root of a scatter passes the inputs of all
# ranks, and an all-to-all of tokens sends as many rows as were routed.
UNEVEN = ("scatter", "all_to_all")


@dataclass(frozen=True)
class Call:
    """One collective as called by one rank: the `number`-th of its group."""

    group: str
    number: int
    operation: str
    num_elements: int
    dtype: str
    site: str
    is_done: bool = True
    root: int | None = None
    """The rank of the world that sends to the others, or receives from them, if it is known."""

    def likeness(self) -> tuple[Any, ...]:
        """The properties that must be the same on every rank."""
        num_elements = 0 if self.operation in UNEVEN else self.num_elements
        return self.operation, num_elements, self.dtype, self.root

    def __str__(self) -> str:
        of_root = "" if self.root is None else f" (root: rank {self.root})"
        return f"{self.operation}{f' of {self.size}' if self.size else ''}{of_root}"

    @property
    def size(self) -> str:
        """The number of elements and their dtype; "" for a barrier."""
        return f"{self.num_elements:,} {self.dtype}" if self.dtype else ""


@dataclass(frozen=True)
class Message:
    """A P2P message that a rank waits for."""

    operation: str
    peers: tuple[int, ...]
    site: str
    axis: str = ""
    """The axis of its process group; "" if unknown."""

    def __str__(self) -> str:
        return f"{self.operation} over {self.axis}" if self.axis else self.operation


@dataclass
class RankState:
    """The state of one rank: its stack, the collectives it called, and what it waits for."""

    rank: int
    stack: list[str] = field(default_factory=list)
    """The main thread's frames, innermost last, each `file:line in function`."""
    site: str = ""
    error: str = ""
    message: Message | None = None
    calls: list[Call] = field(default_factory=list)
    groups: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Process group -> (axis, ranks)."""
    finished: str = ""
    """How this rank left the run; "" if it has not."""

    @classmethod
    def of_dict(cls, values: dict[str, Any]) -> "RankState":
        """The state of these `values`, which asdict made, and which may have been JSON since."""
        message = values.pop("message")
        if message is not None:
            message = Message(**{**message, "peers": tuple(message["peers"])})
        calls = [Call(**call) for call in values.pop("calls")]
        groups = {name: (axis, tuple(own)) for name, (axis, own) in values.pop("groups").items()}
        return cls(**values, message=message, calls=calls, groups=groups)

    def pending(self) -> list[Call]:
        """The first uncompleted collective of each group."""
        first: dict[str, Call] = {}
        for call in self.calls:
            if not call.is_done and call.group not in first:
                first[call.group] = call
        return list(first.values())

    def last_number(self, group: str) -> int:
        """The number of this rank's last collective in the group; 0 if it called none."""
        return max((call.number for call in self.calls if call.group == group), default=0)

    @property
    def waits(self) -> bool:
        return bool(self.pending()) or self.message is not None


@dataclass(frozen=True)
class Absent:
    """A rank that did not report: why, and its last recorded stack."""

    why: str
    stack: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The rank that caused the hang, one line about it, and the state of all ranks."""

    rank: int
    headline: str
    body: str


@dataclass(frozen=True)
class Astray:
    """The first collective of a group at which the calls of the ranks differ."""

    axis: str
    number: int
    rank: int
    text: str


def write_report(
    states: Mapping[int, RankState],
    absent: Mapping[int, Absent],
    reason: str = "",
    describe_place: Callable[[int], str] = lambda rank: "",
    *,
    otherwise: str = "communication failed",
) -> Report:
    """The state of every rank, and the rank that caused the hang.

    `absent` are the ranks that did not report; `states` must hold at least one rank.
    `describe_place` gives the mesh coordinates of a rank. `reason` says why the run has stopped;
    without one, a lost rank does, or different collectives, or else `otherwise`.
    """
    groups = {name: group for state in states.values() for name, group in state.groups.items()}
    missed = _missed(states, absent, groups)
    astray = find_astray(states, groups)
    rank, headline = _blame(states, absent, missed, astray, groups)
    if not reason:
        reason = "ranks called different collectives" if astray else otherwise
        reason = "a rank was lost" if absent else reason
    lines = [f"The run has stopped: {reason}."]
    for number in sorted({*states, *absent}):
        state = states.get(number)
        place = describe_place(number)
        name = f"  rank {number} ({place})" if place else f"  rank {number}"
        if state is None:
            lines.append(f"{name} {absent[number].why}")
        else:
            lines += [f"{name} {line}" for line in _lines_of(state, missed, groups)]
    if astray is not None and astray.text not in headline:
        lines.append(f"  {astray.text}")
    for number in sorted({rank, *(r for r in missed if r in states and not states[r].waits)}):
        stack = states[number].stack if number in states else absent[number].stack
        if stack:
            seen = "" if number in states else ", as last recorded"
            lines.append(f"Python stack of rank {number}{seen} (most recent call last):")
            lines += [f"  {line}" for line in stack]
    return Report(rank, headline, "\n".join(lines))


Groups = Mapping[str, tuple[str, Sequence[int]]]


def _missed(
    states: Mapping[int, RankState], absent: Mapping[int, Absent], groups: Groups
) -> dict[int, list[tuple[int, str]]]:
    """Rank -> (waiting rank, text) for the collectives and messages that it did not reach."""
    missed: dict[int, list[tuple[int, str]]] = {}
    for waiting, state in sorted(states.items()):
        for call in state.pending():
            axis, ranks = groups[call.group]
            for rank in ranks:
                other = states.get(rank)
                is_late = other is None or other.last_number(call.group) < call.number
                if rank != waiting and is_late:
                    what = f"{call.operation} {call.number} over {axis}"
                    missed.setdefault(rank, []).append((waiting, what))
        if state.message is not None:
            for rank in state.message.peers:
                what = f"the {state.message} with rank {waiting}"
                missed.setdefault(rank, []).append((waiting, what))
    return missed


def _lines_of(
    state: RankState, missed: Mapping[int, list[tuple[int, str]]], groups: Groups
) -> Iterator[str]:
    """The state of one rank, in one or more lines."""
    if state.finished:
        yield state.finished
        return
    for call in state.pending():
        axis, ranks = groups[call.group]
        members = ", ".join(map(str, ranks))
        late = sorted(
            rank
            for rank, cases in missed.items()
            if rank in ranks and any(waiting == state.rank for waiting, _ in cases)
        )
        for_whom = f" for {number_ranks(late)}" if late else ""
        yield (
            f"is waiting{for_whom} in {call.operation} {call.number} over {axis} "
            f"(ranks {members}){f', {call.size}' if call.size else ''}, called at {call.site}"
        )
    if state.message is not None:
        peers = number_ranks(state.message.peers) if state.message.peers else "a peer"
        yield f"is waiting for {peers} in a {state.message}, called at {state.message.site}"
    if not state.waits:
        yield f"is at {state.site}"


def _blame(
    states: Mapping[int, RankState],
    absent: Mapping[int, Absent],
    missed: Mapping[int, list[tuple[int, str]]],
    astray: Astray | None,
    groups: Groups,
) -> tuple[int, str]:
    """The rank at the end of the chain of waits, and one line about it."""
    if astray is not None:
        return astray.rank, astray.text
    gone = [rank for rank in sorted(absent) if rank in missed] or sorted(absent)
    if gone:
        return gone[0], absent[gone[0]].why
    if missed:
        rank = min([rank for rank in missed if not states[rank].waits] or missed)
        what = list(dict.fromkeys(what for _, what in missed[rank]))
        waiting = sorted({waiting for waiting, _ in missed[rank]})
        return rank, (
            f"did not reach {' and '.join(what)}; {number_ranks(waiting)} {_verb(waiting)} waiting "
            f"in {'them' if len(what) > 1 else 'it'}; rank {rank} "
            f"{next(_lines_of(states[rank], missed, groups))}"
        )
    others = [rank for rank, state in sorted(states.items()) if state.waits]
    idle = [rank for rank in sorted(states) if rank not in others]
    if others and idle:
        # The flight recorder is off, so the collectives are unknown.
        where = states[idle[0]].finished or f"is at {states[idle[0]].site}"
        return idle[0], (
            f"is not waiting, but {number_ranks(others)} {_verb(others)}; rank {idle[0]} {where}"
        )
    rank = min(states)
    return rank, states[rank].error or "is waiting, although no rank is missing"


def _verb(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def find_astray(
    states: Mapping[int, RankState], groups: Groups, *, by_site: bool = False
) -> Astray | None:
    """The first collective at which the calls of a group's ranks differ; None if all agree.

    With `by_site`, calls from different lines of code differ too. A call that a rank has not made,
    or no longer has in its flight recorder, is not compared.
    """
    for name, (axis, ranks) in groups.items():
        calls = {
            rank: {call.number: call for call in states[rank].calls if call.group == name}
            for rank in ranks
            if rank in states
        }
        calls = {rank: numbered for rank, numbered in calls.items() if numbered}
        if len(calls) < 2:
            continue
        start = max(min(numbered) for numbered in calls.values())
        stop = max(max(numbered) for numbered in calls.values())
        for number in range(start, stop + 1):
            at = {rank: numbered[number] for rank, numbered in calls.items() if number in numbered}
            kinds = Counter(_kind(call, by_site) for call in at.values())
            if len(kinds) > 1:
                return _explain(axis, number, at, calls, kinds, by_site)
    return None


def _kind(call: Call | None, by_site: bool) -> tuple[Any, ...] | None:
    if call is None:
        return None
    return (*call.likeness(), call.site) if by_site else call.likeness()


def _explain(
    axis: str,
    number: int,
    at: Mapping[int, Call],
    calls: Mapping[int, Mapping[int, Call]],
    kinds: Counter[Any],
    by_site: bool,
) -> Astray:
    """Name the rank that diverged: one of the minority; in a tie, user code or the higher rank."""
    who = {_kind(at[rank], by_site): rank for rank in sorted(at, reverse=True)}
    usual = max(who, key=lambda k: (kinds[k], "titanlite/tools/" in at[who[k]].site, -who[k]))
    rank = min(rank for rank, call in at.items() if _kind(call, by_site) != usual)
    peer = who[usual]

    here, there = (
        [_kind(calls[of].get(n), by_site) for n in range(number, max(calls[of]) + 1)]
        for of in (rank, peer)
    )
    own, theirs = at[rank], at[peer]
    others = number_ranks([r for r in at if r != rank])
    what = f"called {own} at {own.site}; {others} called {theirs} at {theirs.site}"
    if _agree(here[1:], there[1:]):
        pass  # only this call differs
    elif len(here) > 1 and here[:2] == there[1::-1]:
        what = f"called {own} at {own.site} before {theirs} at {theirs.site}; {others} called them"
        what += " in the opposite order"
    elif _agree(here, there[1:]):
        what = f"skipped {theirs} at {theirs.site}, which {others} called; its next call was {own}"
        what += f" at {own.site}"
    elif _agree(here[1:], there):
        what = f"called {own} at {own.site}, which {others} did not call"
    return Astray(axis, number, rank, f"at collective {number} over {axis} it {what}")


def _agree(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences agree up to the end of the shorter one, and neither is empty."""
    return bool(one) and bool(other) and all(a == b for a, b in zip(one, other, strict=False))

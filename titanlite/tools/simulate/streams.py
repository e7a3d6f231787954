"""Ranks with one compute stream and several communication streams, in virtual time.

A program is what one rank issues, in order. Compute runs on the rank's main stream. A Transfer runs
on a stream of its own name: it starts when it was issued, when the stream's earlier transfers have
ended and when its partners' transfers are ready, too. A WaitFor blocks the main stream until the
transfer has ended. Transfers that use the same link of a rank share its rate, max-min fairly. Time
jumps from one event to the next; rates change only there.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from titanlite.schedule.timeline import Span, Timeline
from titanlite.tools.simulate.work import SimulationError

MAIN = "compute"
"""The name of the main stream."""


class Compute(NamedTuple):
    """Work on the main stream. `label` is what it counts as.

    On a device that a host feeds, the host takes `launch_seconds` to launch it, one after another
    and ahead of the device: work starts when it is launched and the main stream is free.
    """

    seconds: float
    label: str = ""
    launch_seconds: float = 0.0


class Transfer(NamedTuple):
    """A communication on `stream`: a latency, then `seconds` at the full rate of its links.

    `number` is what a WaitFor names; it is unique on its rank. `links` are the ports of this rank
    that it uses. `partners` are the ranks that take part, beside this one: their transfers with the
    same `meeting` are the same communication, matched in the order of issue. Without partners it
    depends on no other rank. `after` has earlier transfers of this rank, of any stream, that must
    end before it starts.
    """

    number: int
    stream: str
    latency_seconds: float
    seconds: float
    num_bytes: float = 0.0
    label: str = ""
    links: tuple[str, ...] = ()
    partners: tuple[int, ...] = ()
    meeting: str = ""
    after: tuple[int, ...] = ()


class WaitFor(NamedTuple):
    """The main stream waits for a transfer of this rank."""

    number: int


Item = Compute | Transfer | WaitFor


class StreamSpan(NamedTuple):
    """`label` ran on `stream` of `rank` from `start` to `end`."""

    rank: int
    stream: str
    start: float
    end: float
    label: str


@dataclass
class Traffic:
    """The transfers of one stream and label on one rank.

    `exposed_seconds` is the time for which the main stream waited while they ran or were queued
    behind others of their stream; `busy_seconds` is the time for which they ran.
    """

    count: int = 0
    num_bytes: float = 0.0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.busy_seconds - self.exposed_seconds)


@dataclass
class RankTimes:
    """What one rank did: its end, compute seconds by label, its traffic, and seconds without work.

    `launch_seconds` is the time in which the main stream waited for the host. `idle_seconds` is the
    time in which it waited for another rank, or had ended before the last rank. Compute, exposed,
    launch and idle seconds add up to the total.
    """

    end: float = 0.0
    compute: dict[str, float] = field(default_factory=dict)
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    launch_seconds: float = 0.0
    idle_seconds: float = 0.0


@dataclass
class StreamTimes:
    """The result of run_streams."""

    seconds: float
    ranks: dict[int, RankTimes]
    spans: list[StreamSpan] = field(default_factory=list)

    def timeline(self, title: str = "", rows: Mapping[int, str] | None = None) -> Timeline:
        """The spans as a Timeline in seconds: a row for each rank and stream."""
        names = rows or {rank: f"rank {rank}" for rank in self.ranks}
        found: dict[tuple[int, str], None] = dict.fromkeys((rank, MAIN) for rank in self.ranks)
        found.update(dict.fromkeys((span.rank, span.stream) for span in self.spans))
        order = sorted(found, key=lambda row: (row[0], row[1] != MAIN, row[1]))
        number = {row: place for place, row in enumerate(order)}
        return Timeline(
            title,
            [f"{names[rank]} {stream}" for rank, stream in order],
            [
                Span(number[span.rank, span.stream], span.start, span.end, span.label)
                for span in self.spans
            ],
            unit="s",
        )


def run_streams(programs: Mapping[int, Sequence[Item]], *, keep_spans: bool = False) -> StreamTimes:
    """Run the programs of all ranks from time 0. All seconds are of any one unit.

    Raises SimulationError if the ranks wait for each other forever.
    """
    return _Streams(programs, keep_spans).run()


class _Flow:
    """One communication between the ranks in `sides` (rank -> its Transfer)."""

    __slots__ = (
        "arrived",
        "begins",
        "expected",
        "is_running",
        "links",
        "rate",
        "remaining",
        "sides",
    )

    def __init__(self, expected: int) -> None:
        self.sides: dict[int, Transfer] = {}
        self.expected, self.arrived = expected, 0
        self.links: tuple[tuple[int, str], ...] = ()
        self.begins = self.remaining = self.rate = 0.0


class _Rank:
    """The state of one rank's main stream."""

    __slots__ = ("at", "blocked_on", "blocked_since", "clock", "host", "program", "times")

    def __init__(self, program: Sequence[Item]) -> None:
        self.program, self.at = program, 0
        self.clock = self.host = 0.0
        self.blocked_on: int | None = None
        self.blocked_since = 0.0
        self.times = RankTimes()


class _Streams:
    """The run: a heap of events, the queue of each stream, and the flows that move data."""

    def __init__(self, programs: Mapping[int, Sequence[Item]], keep_spans: bool) -> None:
        self.ranks = {rank: _Rank(program) for rank, program in programs.items()}
        self.keep_spans = keep_spans
        self.spans: list[StreamSpan] = []
        self.last_span: dict[tuple[int, str], int] = {}
        self.events: list[tuple[float, int, int, object]] = []
        self.count = 0
        self.queues: dict[tuple[int, str], deque[_Flow]] = defaultdict(deque)
        self.meetings: dict[tuple[object, ...], deque[_Flow]] = defaultdict(deque)
        self.flow_of: dict[tuple[int, int], _Flow] = {}
        self.ended: dict[tuple[int, int], float] = {}
        self.blocks: dict[tuple[int, int], list[_Flow]] = defaultdict(list)
        self.busy: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        self.active: list[_Flow] = []
        self.now = self.moved_until = 0.0
        self.version = 0

    def run(self) -> StreamTimes:
        for rank in self.ranks:
            self._post(0.0, 0, rank)
        while self.events:
            self.now, _, kind, what = heappop(self.events)
            if kind == 0:
                self._advance(what)  # type: ignore[arg-type]
            elif kind == 1:
                self._flows_begin(what)  # type: ignore[arg-type]
            elif what == self.version:
                self._flows_end()
        total = max((rank.times.end for rank in self.ranks.values()), default=0.0)
        stuck = next(((of, queue[0]) for of, queue in self.queues.items() if queue), None)
        if stuck is not None:
            (number, stream), flow = stuck
            label = flow.sides[number].label or "a transfer"
            raise SimulationError(
                f"rank {number} waits forever for {label} on {stream}: a partner never issues it, "
                "or ranks issue transfers in different orders"
            )
        for one in self.ranks.values():
            times = one.times
            spent = sum(times.compute.values()) + times.launch_seconds
            spent += sum(traffic.exposed_seconds for traffic in times.traffic.values())
            times.idle_seconds = max(0.0, total - spent)
        return StreamTimes(total, {n: r.times for n, r in self.ranks.items()}, self.spans)

    def _post(self, time: float, kind: int, what: object) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, kind, what))

    # The main stream

    def _advance(self, number: int) -> None:
        """Run the program of a rank until it blocks, ends or must let time pass."""
        rank = self.ranks[number]
        program, times, now = rank.program, rank.times, self.now
        clock = max(rank.clock, now)
        compute = times.compute
        while rank.at < len(program):
            item = program[rank.at]
            if isinstance(item, Compute):
                rank.host += item.launch_seconds
                start = clock
                if item.launch_seconds and rank.host > clock:
                    start = rank.host
                    times.launch_seconds += start - clock
                clock = start + item.seconds
                compute[item.label] = compute.get(item.label, 0.0) + item.seconds
                if self.keep_spans and item.seconds:
                    self._note(number, MAIN, start, clock, item.label)
                rank.at += 1
                continue
            if clock > now:
                # Other ranks may act before this: come back then.
                rank.clock = clock
                self._post(clock, 0, number)
                return
            if isinstance(item, Transfer):
                rank.at += 1
                self._issue(number, item)
                continue
            key = number, item.number
            if key not in self.ended:
                if key not in self.flow_of:
                    raise SimulationError(
                        f"rank {number} waits for transfer {item.number}, which it never issued"
                    )
                rank.clock, rank.blocked_on, rank.blocked_since = clock, item.number, clock
                return
            rank.at += 1
        rank.clock = clock
        times.end = max(times.end, clock)

    def _note(self, rank: int, stream: str, start: float, end: float, label: str) -> None:
        """A span, joined to the one before it if that is of the same label and ends here."""
        at = self.last_span.get((rank, stream))
        if at is not None:
            last = self.spans[at]
            if last.end == start and last.label == label:
                self.spans[at] = last._replace(end=end)
                return
        self.last_span[rank, stream] = len(self.spans)
        self.spans.append(StreamSpan(rank, stream, start, end, label))

    # Transfers

    def _issue(self, number: int, item: Transfer) -> None:
        if item.partners:
            everyone = tuple(sorted((number, *item.partners)))
            waiting = self.meetings[item.meeting, everyone]
            flow = next((flow for flow in waiting if number not in flow.sides), None)
            if flow is None:
                flow = _Flow(len(everyone))
                waiting.append(flow)
        else:
            flow = _Flow(1)
        flow.sides[number] = item
        self.flow_of[number, item.number] = flow
        for other in item.after:
            key = number, other
            if key not in self.flow_of:
                raise SimulationError(
                    f"transfer {item.number} of rank {number} comes after transfer {other}, which "
                    "was not issued before"
                )
            if key not in self.ended:
                flow.expected += 1
                self.blocks[key].append(flow)
        queue = self.queues[number, item.stream]
        queue.append(flow)
        if queue[0] is flow:
            self._reach_head(flow)

    def _reach_head(self, flow: _Flow) -> None:
        """The flow is first in one more of its streams, or a transfer before it has ended.

        It begins if that was the last that it waited for.
        """
        flow.arrived += 1
        if flow.arrived < flow.expected:
            return
        one = next(iter(flow.sides.values()))
        if one.partners:
            everyone = tuple(sorted(flow.sides))
            self.meetings[one.meeting, everyone].remove(flow)
        flow.begins = self.now
        flow.remaining = max(item.seconds for item in flow.sides.values())
        flow.links = tuple((rank, link) for rank, item in flow.sides.items() for link in item.links)
        latency = max(item.latency_seconds for item in flow.sides.values())
        if latency:
            self._post(self.now + latency, 1, flow)
        else:
            self._flows_begin(flow)

    def _flows_begin(self, flow: _Flow) -> None:
        self._move()
        self.active.append(flow)
        self._share()

    def _move(self) -> None:
        """Move the data of all active flows up to now."""
        passed = self.now - self.moved_until
        if passed:
            for flow in self.active:
                flow.remaining -= passed * flow.rate
        self.moved_until = self.now

    def _share(self) -> None:
        """Max-min fair rates: the fullest link limits its flows first, then the next one."""
        users: dict[tuple[int, str], list[_Flow]] = defaultdict(list)
        for flow in self.active:
            flow.rate = -1.0
            for link in flow.links:
                users[link].append(flow)
        left = dict.fromkeys(users, 1.0)
        unset = {link: len(flows) for link, flows in users.items()}
        while unset:
            link = min(unset, key=lambda key: left[key] / unset[key])
            rate = left[link] / unset[link]
            for flow in users[link]:
                if flow.rate < 0:
                    flow.rate = rate
                    for other in flow.links:
                        left[other] -= rate
                        unset[other] -= 1
            unset = {key: count for key, count in unset.items() if count > 0}
        first = None
        for flow in self.active:
            if flow.rate < 0:
                flow.rate = 1.0
            end = self.now + max(0.0, flow.remaining) / flow.rate
            first = end if first is None or end < first else first
        self.version += 1
        if first is not None:
            self._post(first, 2, self.version)

    def _flows_end(self) -> None:
        """End the flows whose data have arrived."""
        self._move()
        least = min(flow.remaining / flow.rate for flow in self.active)
        # What is left by rounding counts as moved.
        limit = max(least, 0.0) + self.now * 1e-14
        done = [flow for flow in self.active if flow.remaining / flow.rate <= limit]
        self.active = [flow for flow in self.active if flow not in done]
        for flow in done:
            self._end(flow)
        self._share()

    def _end(self, flow: _Flow) -> None:
        for number, item in flow.sides.items():
            self.ended[number, item.number] = self.now
            self.busy[number, item.stream].append((flow.begins, self.now))
            rank = self.ranks[number]
            traffic = rank.times.traffic.setdefault((item.stream, item.label), Traffic())
            traffic.count += 1
            traffic.num_bytes += item.num_bytes
            traffic.busy_seconds += self.now - flow.begins
            rank.times.end = max(rank.times.end, self.now)
            if self.keep_spans and self.now > flow.begins:
                self._note(number, item.stream, flow.begins, self.now, item.label)
            queue = self.queues[number, item.stream]
            assert queue[0] is flow
            queue.popleft()
            if queue:
                self._reach_head(queue[0])
            for blocked in self.blocks.pop((number, item.number), ()):
                self._reach_head(blocked)
            if rank.blocked_on == item.number:
                since = rank.blocked_since
                traffic.exposed_seconds += self._busy_since(number, item.stream, since)
                rank.blocked_on = None
                rank.clock = self.now
                self._post(self.now, 0, number)

    def _busy_since(self, rank: int, stream: str, since: float) -> float:
        """The time since `since` in which the stream ran a transfer."""
        intervals = self.busy[rank, stream]
        at = bisect.bisect_right(intervals, (since,))
        found = sum(end - start for start, end in intervals[at:])
        if at:
            found += max(0.0, intervals[at - 1][1] - since)
        return found

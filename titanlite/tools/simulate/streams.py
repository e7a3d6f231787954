"""A rank with one compute stream and several communication streams, in virtual time.

A program is what the rank issues, in order. Compute runs on its main stream. A Transfer runs on a
stream of its own name: it starts when it was issued and the stream's earlier transfers have ended;
the ranks that take part beside this one are always ready. A WaitFor blocks the main stream until
the transfer has ended. Transfers that use the same link share its rate, max-min fairly. Time jumps
from one event to the next; rates change only there.
"""

import bisect
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

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


class StreamTransfer(NamedTuple):
    """A communication on `stream`: a latency, then `seconds` at the full rate of its links.

    `number` is what a WaitFor names; it is unique. `links` are the ports that it uses. `after` has
    earlier transfers, of any stream, that must end before it starts.
    """

    number: int
    stream: str
    latency_seconds: float
    seconds: float
    num_bytes: float = 0.0
    label: str = ""
    links: tuple[str, ...] = ()
    after: tuple[int, ...] = ()


class WaitFor(NamedTuple):
    """The main stream waits for a transfer."""

    number: int


Item = Compute | StreamTransfer | WaitFor


class StreamSpan(NamedTuple):
    """`label` ran on `stream` from `start` to `end`."""

    stream: str
    start: float
    end: float
    label: str


@dataclass
class StreamTraffic:
    """The transfers of one stream and label.

    `exposed_seconds` is the time for which the main stream waited while they ran or were queued
    behind others of their stream; `busy_seconds` is the time for which they ran.
    """

    count: int = 0
    num_bytes: float = 0.0
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclass
class StreamTimes:
    """What a rank did: its seconds, those of compute by label, its traffic by stream and label.

    `launch_seconds` is the time in which the main stream waited for the host. `idle_seconds` is the
    time for which transfers went on after its end. Compute, exposed, launch and idle seconds add up
    to the total.
    """

    seconds: float = 0.0
    compute: dict[str, float] = field(default_factory=dict)
    traffic: dict[tuple[str, str], StreamTraffic] = field(default_factory=dict)
    launch_seconds: float = 0.0
    idle_seconds: float = 0.0
    spans: list[StreamSpan] = field(default_factory=list)


def run_streams(program: Sequence[Item], *, keep_spans: bool = False) -> StreamTimes:
    """Run the program of a rank from time 0. All seconds are of any one unit.

    Raises SimulationError if it waits for a transfer that it has not issued.
    """
    return _Streams(program, keep_spans).run()


class _Flow:
    """A transfer on its way, and how many it waits for: those of `after`, and of its stream."""

    __slots__ = ("begins", "item", "num_before", "rate", "remaining")

    def __init__(self, item: StreamTransfer) -> None:
        self.item, self.num_before = item, 1
        self.begins = self.remaining = self.rate = 0.0


class _Streams:
    """The run: a heap of events, the queue of each stream, and the flows that move data."""

    def __init__(self, program: Sequence[Item], keep_spans: bool) -> None:
        self.program, self.at = program, 0
        self.clock = self.host = 0.0
        self.blocked_on: int | None = None
        self.blocked_since = 0.0
        self.times, self.keep_spans = StreamTimes(), keep_spans
        self.last_span: dict[str, int] = {}
        self.events: list[tuple[float, int, int, object]] = []
        self.count = 0
        self.queues: dict[str, deque[_Flow]] = defaultdict(deque)
        self.issued: set[int] = set()
        self.ended: set[int] = set()
        self.blocks: dict[int, list[_Flow]] = defaultdict(list)
        self.busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.active: list[_Flow] = []
        self.now = self.moved_until = 0.0
        self.version = 0

    def run(self) -> StreamTimes:
        self._advance()
        while self.events:
            self.now, _, kind, what = heappop(self.events)
            if kind == 0:
                self._advance()
            elif kind == 1:
                self._flows_begin(what)  # type: ignore[arg-type]
            elif what == self.version:
                self._flows_end()
        times = self.times
        spent = sum(times.compute.values()) + times.launch_seconds
        spent += sum(traffic.exposed_seconds for traffic in times.traffic.values())
        times.idle_seconds = max(0.0, times.seconds - spent)
        return times

    def _post(self, time: float, kind: int, what: object = None) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, kind, what))

    # The main stream

    def _advance(self) -> None:
        """Run the program until it blocks, ends or must let time pass."""
        program, times, now = self.program, self.times, self.now
        clock = max(self.clock, now)
        compute = times.compute
        while self.at < len(program):
            item = program[self.at]
            if isinstance(item, Compute):
                self.host += item.launch_seconds
                start = clock
                if item.launch_seconds and self.host > clock:
                    start = self.host
                    times.launch_seconds += start - clock
                clock = start + item.seconds
                compute[item.label] = compute.get(item.label, 0.0) + item.seconds
                if self.keep_spans and item.seconds:
                    self._note(MAIN, start, clock, item.label)
                self.at += 1
                continue
            if clock > now:
                # Transfers may act before this: come back then.
                self.clock = clock
                self._post(clock, 0)
                return
            if isinstance(item, StreamTransfer):
                self.at += 1
                self._issue(item)
                continue
            if item.number not in self.ended:
                if item.number not in self.issued:
                    raise SimulationError(
                        f"the program waits for transfer {item.number}, which it never issued"
                    )
                self.clock, self.blocked_on, self.blocked_since = clock, item.number, clock
                return
            self.at += 1
        self.clock = clock
        times.seconds = max(times.seconds, clock)

    def _note(self, stream: str, start: float, end: float, label: str) -> None:
        """A span, joined to the one before it if that is of the same label and ends here."""
        spans, at = self.times.spans, self.last_span.get(stream)
        if at is not None and (spans[at].end, spans[at].label) == (start, label):
            spans[at] = spans[at]._replace(end=end)
            return
        self.last_span[stream] = len(spans)
        spans.append(StreamSpan(stream, start, end, label))

    # Transfers

    def _issue(self, item: StreamTransfer) -> None:
        flow = _Flow(item)
        self.issued.add(item.number)
        for other in item.after:
            if other not in self.issued:
                raise SimulationError(
                    f"transfer {item.number} comes after transfer {other}, which was not issued "
                    "before"
                )
            if other not in self.ended:
                flow.num_before += 1
                self.blocks[other].append(flow)
        queue = self.queues[item.stream]
        queue.append(flow)
        if queue[0] is flow:
            self._come_nearer(flow)

    def _come_nearer(self, flow: _Flow) -> None:
        """The flow is first in its stream, or a transfer before it has ended.

        It begins if that was the last that it waited for.
        """
        flow.num_before -= 1
        if flow.num_before:
            return
        flow.begins = self.now
        flow.remaining = flow.item.seconds
        if flow.item.latency_seconds:
            self._post(self.now + flow.item.latency_seconds, 1, flow)
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
        users: dict[str, list[_Flow]] = defaultdict(list)
        for flow in self.active:
            flow.rate = -1.0
            for link in flow.item.links:
                users[link].append(flow)
        left = dict.fromkeys(users, 1.0)
        unset = {link: len(flows) for link, flows in users.items()}
        while unset:
            link = min(unset, key=lambda key: left[key] / unset[key])
            rate = left[link] / unset[link]
            for flow in users[link]:
                if flow.rate < 0:
                    flow.rate = rate
                    for other in flow.item.links:
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
        item, times = flow.item, self.times
        self.ended.add(item.number)
        self.busy[item.stream].append((flow.begins, self.now))
        traffic = times.traffic.setdefault((item.stream, item.label), StreamTraffic())
        traffic.count += 1
        traffic.num_bytes += item.num_bytes
        traffic.busy_seconds += self.now - flow.begins
        times.seconds = max(times.seconds, self.now)
        if self.keep_spans and self.now > flow.begins:
            self._note(item.stream, flow.begins, self.now, item.label)
        queue = self.queues[item.stream]
        assert queue[0] is flow
        queue.popleft()
        if queue:
            self._come_nearer(queue[0])
        for blocked in self.blocks.pop(item.number, ()):
            self._come_nearer(blocked)
        if self.blocked_on == item.number:
            traffic.exposed_seconds += self._busy_since(item.stream, self.blocked_since)
            self.blocked_on = None
            self.clock = self.now
            self._post(self.now, 0)

    def _busy_since(self, stream: str, since: float) -> float:
        """The time since `since` in which the stream ran a transfer."""
        intervals = self.busy[stream]
        at = bisect.bisect_right(intervals, (since,))
        found = sum(end - start for start, end in intervals[at:])
        if at:
            found += max(0.0, intervals[at - 1][1] - since)
        return found

"""Greedy list scheduling in virtual time, event by event.

Time jumps from one event to the next: a work item ends, its data arrives, or a worker becomes free.
At each event, every free worker starts the ready work item with the smallest priority key, or the
next one of its fixed order. A heap holds the distinct times, a bucket holds the events of each
time, and a heap per worker holds its ready work: n work items take about n log(n) steps under any
strategy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from titanlite.simulate.costs import Costs
from titanlite.simulate.work import SimulationError


class Extra(NamedTuple):
    """Time a worker spent moving data for a work item; `kind` is "FETCH" or "SEND"."""

    worker: int
    start: float
    end: float
    kind: str
    work: int


@dataclass
class Plan:
    """The input of the engine. Work items are numbered as in placement.py.

    The weight gradient of a split backward has number `num_chained + batch * num_stages + stage`.
    `is_split[number - num_chained]` says whether that backward is split. A worker picks the ready
    work item with the smallest `priority_key(number)`, or follows its list in `orders`.
    `max_in_flight` (by worker) limits the forwards whose backward has not ended.
    """

    num_workers: int
    num_stages: int
    num_batches: int
    compute: list[int]
    weight: list[int]
    costs: Costs
    is_split: bytearray
    priority_key: Callable[[int], int] | None = None
    orders: Sequence[Sequence[int]] | None = None
    max_in_flight: Sequence[float] | None = None
    num_chained: int = field(init=False)
    durations: list[float] = field(init=False)
    weight_durations: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.num_chained = 2 * self.num_stages * self.num_batches
        per_stage = self.costs.per_stage
        forward = per_stage("forward", self.num_stages)
        self.weight_durations = per_stage("weight_gradient", self.num_stages)
        backward = per_stage("backward", self.num_stages)
        self.durations = forward + backward[::-1]
        for stage, (part, whole) in enumerate(zip(self.weight_durations, backward, strict=True)):
            if part > whole:
                raise SimulationError(
                    f"costs: weight_gradient of stage {stage} is {part}; it must not exceed the "
                    f"backward time, {whole}"
                )

    def weight_gradient(self, backward: int) -> int:
        """The number of the weight gradient that belongs to `backward`."""
        batch, k = divmod(backward, 2 * self.num_stages)
        return self.num_chained + batch * self.num_stages + 2 * self.num_stages - 1 - k

    def backward_of(self, number: int) -> int:
        """The number of the backward that matches a weight gradient or a forward."""
        if number >= self.num_chained:
            batch, stage = divmod(number - self.num_chained, self.num_stages)
        else:
            batch, stage = divmod(number, 2 * self.num_stages)
        return (batch * 2 + 2) * self.num_stages - 1 - stage

    def worker(self, number: int) -> int:
        return self.compute[number if number < self.num_chained else self.backward_of(number)]

    def duration(self, number: int) -> float:
        """The compute time of a work item; a split backward excludes its weight gradient."""
        if number >= self.num_chained:
            return self.weight_durations[(number - self.num_chained) % self.num_stages]
        k = number % (2 * self.num_stages)
        if k >= self.num_stages and self.is_split[self.weight_gradient(number) - self.num_chained]:
            return self.durations[k] - self.weight_durations[2 * self.num_stages - 1 - k]
        return self.durations[k]


def run(plan: Plan) -> tuple[list[float | None], list[Extra]]:
    """The start of every work item by number (None if it never starts), and all transfers.

    The starts of weight gradients come after all others, if any backward is split.
    """
    engine = _Engine(plan)
    engine.run()
    return engine.starts, engine.extras


class _Ordered:
    """The ready work when each worker has a fixed order: it takes the next item, or waits."""

    def __init__(self, orders: Sequence[Sequence[int]], total: int) -> None:
        self.orders = orders
        self.position = [0] * len(orders)
        self.is_ready = bytearray(total)

    def put(self, number: int, worker: int) -> None:
        self.is_ready[number] = 1

    def take(self, worker: int) -> int | None:
        order, at = self.orders[worker], self.position[worker]
        if at == len(order) or not self.is_ready[order[at]]:
            return None
        self.position[worker] = at + 1
        return order[at]


class _ByPriority:
    """The ready work in one heap per worker, which takes the item with the smallest key."""

    def __init__(self, plan: Plan, total: int) -> None:
        assert plan.priority_key is not None
        self.key_of = plan.priority_key
        self.num_chained, self.total = plan.num_chained, total
        # Weight gradients have the lowest priority: they fill the bubbles.
        self.last_key = (1 << 62) * total
        self.heaps: list[list[int]] = [[] for _ in range(plan.num_workers)]

    def put(self, number: int, worker: int) -> None:
        if number < self.num_chained:
            heappush(self.heaps[worker], self.key_of(number) * self.total + number)
        else:
            heappush(self.heaps[worker], self.last_key + number)

    def take(self, worker: int) -> int | None:
        heap = self.heaps[worker]
        return heappop(heap) % self.total if heap else None


class _Capped(_ByPriority):
    """Like _ByPriority, but forwards have their own heap; a worker needs `room` to take one."""

    def __init__(self, plan: Plan, room: list[float], total: int) -> None:
        super().__init__(plan, total)
        self.stages, self.chain = plan.num_stages, 2 * plan.num_stages
        self.room = room
        self.forwards: list[list[int]] = [[] for _ in range(plan.num_workers)]

    def put(self, number: int, worker: int) -> None:
        if number >= self.num_chained:
            heappush(self.heaps[worker], self.last_key + number)
        else:
            heaps = self.forwards if number % self.chain < self.stages else self.heaps
            heappush(heaps[worker], self.key_of(number) * self.total + number)

    def take(self, worker: int) -> int | None:
        heap, forwards = self.heaps[worker], self.forwards[worker]
        if forwards and self.room[worker] > 0 and not (heap and heap[0] < forwards[0]):
            self.room[worker] -= 1
            heap = forwards
        return heappop(heap) % self.total if heap else None


class _Engine:
    """One run of a plan: the current time, the pending events, and the idle workers.

    An event is the end of a work item (its number), the arrival of its input (~number), or a worker
    that becomes free after a transfer (total + worker). `touched` lists the affected workers.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.compute = plan, plan.compute
        self.stages, self.chain = plan.num_stages, 2 * plan.num_stages
        self.num_chained = plan.num_chained
        self.splits = any(plan.is_split)
        self.total = plan.num_chained + (len(plan.is_split) if self.splits else 0)
        self.starts: list[float | None] = [None] * self.total
        self.extras: list[Extra] = []

        # How many more forwards each worker may start; None if unlimited.
        self.room = None if plan.max_in_flight is None else list(plan.max_in_flight)
        self.ready: _Ordered | _ByPriority
        if plan.orders is not None:
            self.ready = _Ordered(plan.orders, self.total)
        elif self.room is not None:
            self.ready = _Capped(plan, self.room, self.total)
        else:
            self.ready = _ByPriority(plan, self.total)

        self.now: float = 0
        self.times: list[float] = [0]
        self.events: dict[float, list[int]] = {
            0: [~first for first in range(0, plan.num_chained, self.chain)]
        }
        self.idle = bytearray(b"\1" * plan.num_workers)
        self.touched: list[int] = []

        costs = self.costs = plan.costs
        self.network = costs.network
        self.port_free: list[float] = [0] * plan.num_workers
        self.weight_units = costs.per_stage("weight_units", plan.num_stages)
        self.fetches = costs.network is not None and any(self.weight_units)
        self.fetch_free: list[float] = [0] * plan.num_workers
        self.recent_starts: list[deque[float]] = [deque(maxlen=costs.prefetch) for _ in self.idle]

    def run(self) -> None:
        """Process all events. The common path is inline for speed; rare cases are in methods."""
        times, events, compute, starts = self.times, self.events, self.compute, self.starts
        put, take, post = self.ready.put, self.ready.take, self._post
        idle, touched, durations = self.idle, self.touched, self.plan.durations
        num_chained, total, stages, chain = self.num_chained, self.total, self.stages, self.chain
        splits, network, fetches = self.splits, self.network, self.fetches
        backward_ends_more = splits or self.room is not None
        while times:
            self.now = now = heappop(times)
            for event in events.pop(now):
                if event < 0:
                    put(~event, compute[~event])
                    touched.append(compute[~event])
                elif event < num_chained:
                    # A work item ends: its worker is free, and its successors can start.
                    worker = compute[event]
                    idle[worker] = 1
                    touched.append(worker)
                    k = event % chain
                    if k >= stages and backward_ends_more:
                        self._end_backward(event, k, worker)
                    if k + 1 < chain:
                        target = compute[event + 1]
                        if target == worker or network is None:
                            put(event + 1, target)
                            touched.append(target)
                        else:
                            self._send(event, worker, target)
                elif event < total:
                    self._end_weight_gradient(event)
                else:
                    idle[event - total] = 1
                    touched.append(event - total)
            for worker in touched:
                if not idle[worker] or (number := take(worker)) is None:
                    continue
                idle[worker] = 0
                starts[number] = start = self._fetch(number, worker) if fetches else now
                k = number % chain
                if splits and (number >= num_chained or k >= stages):
                    post(start + self.plan.duration(number), number)
                else:
                    post(start + durations[k], number)
            touched.clear()

    def _post(self, time: float, event: int) -> None:
        bucket = self.events.get(time)
        if bucket is None:
            self.events[time] = [event]
            heappush(self.times, time)
        else:
            bucket.append(event)

    def _end_backward(self, number: int, k: int, worker: int) -> None:
        """Make the weight gradient ready if the backward is split; otherwise, end the batch."""
        place = number // self.chain * self.stages + self.chain - 1 - k
        if self.plan.is_split[place]:
            self.ready.put(self.num_chained + place, worker)
        elif self.room is not None:
            self._end_batch(self.compute[number - 2 * (k - self.stages) - 1])

    def _end_weight_gradient(self, number: int) -> None:
        worker = self.plan.worker(number)
        self.idle[worker] = 1
        self.touched.append(worker)
        batch, stage = divmod(number - self.num_chained, self.stages)
        self._end_batch(self.compute[batch * self.chain + stage])

    def _end_batch(self, opener: int) -> None:
        """The backward of a forward on `opener` has ended: `opener` may start another forward."""
        if self.room is not None:
            self.room[opener] += 1
        self.touched.append(opener)

    def _send(self, number: int, worker: int, target: int) -> None:
        """Send the output of `number`. The next work item is ready when it arrives.

        Without overlap, the sender is blocked until then.
        """
        assert self.network is not None
        costs, link = self.costs, self.network.link(worker, target)
        if costs.overlap_transfers:
            leaves = max(self.now, self.port_free[worker])
            sent = leaves + costs.activation_units * link.seconds_per_unit
            self.port_free[worker] = sent
            arrival = sent + link.latency_seconds
        else:
            arrival = self.now + link.seconds(costs.activation_units)
            if arrival > self.now:
                self.idle[worker] = 0
                self.extras.append(Extra(worker, self.now, arrival, "SEND", number))
                self._post(arrival, self.total + worker)
        if arrival > self.now:
            self._post(arrival, ~(number + 1))
        else:
            self.ready.put(number + 1, target)
            self.touched.append(target)

    def _fetch(self, number: int, worker: int) -> float:
        """The time at which `number` can compute; if its weights are remote, fetch them first."""
        before = self.recent_starts[worker]
        k = number % self.chain
        units = self.weight_units[min(k, self.chain - 1 - k)]
        start = self.now
        if number < self.num_chained and units and self.plan.weight[number] != worker:
            begin = start
            if self.costs.prefetch:
                is_full = len(before) == self.costs.prefetch
                begin = max(before[0] if is_full else 0, self.fetch_free[worker])
            assert self.network is not None
            link = self.network.link(self.plan.weight[number], worker)
            end = self.fetch_free[worker] = begin + link.seconds(units)
            self.extras.append(Extra(worker, begin, end, "FETCH", number))
            start = max(start, end)
        before.append(start)
        return start

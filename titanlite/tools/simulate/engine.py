"""Greedy list scheduling in virtual time, event by event.

Time is a whole number of ticks (exact.py), so work that is ready at the same time is seen to be.
Time jumps from one event to the next: a work item ends, its data arrives, or a worker becomes free.
At each event, every free worker starts the ready work item with the smallest priority key, or the
next one of its fixed order. A heap holds the distinct times, a bucket holds the events of each
time, and a heap per worker holds its ready work: n work items take about n log(n) steps under any
strategy.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from titanlite.tools.simulate.plan import Plan


class Extra(NamedTuple):
    """Ticks a worker spent moving data for a work item; `kind` is "FETCH" or "SEND"."""

    worker: int
    start: int
    end: int
    kind: str
    work: int


def run(plan: Plan) -> tuple[list[int | None], list[Extra]]:
    """The start tick of every work item by number (None if it never starts), and all transfers.

    The starts of weight gradients come after all others, if any backward is split.
    """
    engine = _Engine(plan)
    engine.run()
    return engine.starts, engine.extras


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
        self.starts: list[int | None] = [None] * self.total
        self.extras: list[Extra] = []

        # How many more forwards each worker may start; None if unlimited.
        self.room = None if plan.max_in_flight is None else list(plan.max_in_flight)
        self.ready: InOrder | ByPriority
        if plan.orders is not None:
            self.ready = InOrder(plan.orders, self.total)
        elif self.room is not None:
            self.ready = Capped(self.room, plan.num_stages, plan.keys, plan.modulus)
        else:
            self.ready = ByPriority(plan.num_workers, plan.keys, plan.modulus)
        self.put = self._put_if_complete if plan.needs else self.ready.put

        # The inputs that a work item with needs still waits for, and the work that needs an output.
        self.missing = {number: len(needed) + 1 for number, needed in plan.needs.items()}
        self.followers: dict[int, list[int]] = {}
        for number, needed in plan.needs.items():
            for before in needed:
                self.followers.setdefault(before, []).append(number)

        self.now = 0
        self.times = [0]
        self.events: dict[int, list[int]] = {
            0: [~first for first in range(0, plan.num_chained, self.chain)]
        }
        self.idle = bytearray(b"\1" * plan.num_workers)
        self.touched: list[int] = []

        costs = self.costs = plan.costs
        self.network = costs.network
        self.port_free = [0] * plan.num_workers
        self.weight_units = plan.tick_costs.weight_units
        self.fetches = costs.network is not None and any(self.weight_units)
        self.fetch_free = [0] * plan.num_workers
        # When each owner serves fetches, by its links between and inside nodes.
        self.serving: dict[tuple[int, bool], list[list[int]]] = {}
        self.recent_starts: list[deque[int]] = [deque(maxlen=costs.prefetch) for _ in self.idle]

    def run(self) -> None:
        """Process all events. The common path is inline for speed; rare cases are in methods."""
        times, events, compute, starts = self.times, self.events, self.compute, self.starts
        idle, touched, durations = self.idle, self.touched, self.plan.durations
        busy_until = [0] * self.plan.num_workers
        num_chained, total, stages, chain = self.num_chained, self.total, self.stages, self.chain
        put, take, mask = self.put, self.ready.take, self.plan.modulus - 1
        heaps, keys = None, self.plan.keys
        if type(self.ready) is ByPriority and not self.plan.needs:
            heaps = self.ready.heaps
        splits, network, fetches = self.splits, self.network, self.fetches
        overlap, port_free = self.costs.overlap_transfers, self.port_free
        nodes = self.plan.nodes
        inside, between = (
            (link.latency, link.transfer)
            for link in (self.plan.tick_costs.inside, self.plan.tick_costs.between)
        )
        backward_ends_more = splits or self.room is not None
        followers = self.followers
        while times:
            self.now = now = heappop(times)
            for event in events.pop(now):
                if event < 0:
                    # The input of a work item arrives.
                    number = ~event
                    target = compute[number]
                elif event < num_chained:
                    # A work item ends: its worker is free, and its successor can start.
                    worker = compute[event]
                    idle[worker] = 1
                    touched.append(worker)
                    k = event % chain
                    if k >= stages and backward_ends_more:
                        self._end_backward(event, k, worker)
                    if followers and event in followers:
                        self._deliver(event, k, worker)
                        continue
                    if k + 1 == chain:
                        continue
                    number = event + 1
                    target = compute[number]
                    if target != worker and network is not None:
                        if overlap:
                            latency, transfer = (
                                inside if nodes[worker] == nodes[target] else between
                            )
                            sent = port_free[worker]
                            sent = port_free[worker] = transfer + (sent if sent > now else now)
                            time = sent + latency
                        else:
                            time = self._send(event, worker, target)
                        # A worker that is still busy then can have its work on its heap now.
                        if time > now and (idle[target] or time > busy_until[target]):
                            bucket = events.get(time)
                            if bucket is None:
                                events[time] = [~number]
                                heappush(times, time)
                            else:
                                bucket.append(~number)
                            continue
                elif event < total:
                    self._end_weight_gradient(event)
                    continue
                else:
                    if port_free[event - total] <= now:
                        idle[event - total] = 1
                        touched.append(event - total)
                    continue
                # `number` is ready on `target`. A busy worker is touched when it ends its work.
                if heaps is not None:
                    heappush(heaps[target], keys[number])
                else:
                    put(number, target)
                if idle[target]:
                    touched.append(target)
            for worker in touched:
                if not idle[worker]:
                    continue
                if heaps is not None:
                    heap = heaps[worker]
                    if not heap:
                        continue
                    number = heappop(heap) & mask
                elif (taken := take(worker)) is not None:
                    number = taken
                else:
                    continue
                idle[worker] = 0
                starts[number] = start = self._fetch(number, worker) if fetches else now
                k = number % chain
                if splits and (number >= num_chained or k >= stages):
                    time = start + self.plan.duration(number)
                else:
                    time = start + durations[k]
                busy_until[worker] = time
                bucket = events.get(time)
                if bucket is None:
                    events[time] = [number]
                    heappush(times, time)
                else:
                    bucket.append(number)
            touched.clear()

    def _post(self, time: int, event: int) -> None:
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

    def _put_if_complete(self, number: int, worker: int) -> None:
        """An input of `number` is there; it is ready if that was the last one."""
        missing = self.missing.get(number, 1) - 1
        self.missing[number] = missing
        if not missing:
            self.ready.put(number, worker)

    def _deliver(self, number: int, k: int, worker: int) -> None:
        """Give the output of `number` to its successor and its followers: one message a worker.

        The next worker is served first, as in a ring, so that not all send to worker 0 first.
        """
        receivers: dict[int, list[int]] = {}
        for follower in (*([number + 1] if k + 1 < self.chain else []), *self.followers[number]):
            receivers.setdefault(self.compute[follower], []).append(follower)
        for target in sorted(receivers, key=lambda other: (other - worker) % len(self.idle)):
            arrival = self.now
            if target != worker and self.network is not None:
                arrival = self._send(number, worker, target)
            for follower in receivers[target]:
                if arrival > self.now:
                    self._post(arrival, ~follower)
                else:
                    self.put(follower, target)
                    self.touched.append(target)

    def _send(self, number: int, worker: int, target: int) -> int:
        """When the output of `number` arrives; without overlap, the sender is busy until then."""
        link = self.plan.link(worker, target)
        leaves = max(self.now, self.port_free[worker])
        if self.costs.overlap_transfers:
            sent = self.port_free[worker] = leaves + link.transfer
            return sent + link.latency
        arrival = self.port_free[worker] = leaves + link.latency + link.transfer
        if arrival > leaves:
            self.idle[worker] = 0
            self.extras.append(Extra(worker, leaves, arrival, "SEND", number))
            self._post(arrival, self.total + worker)
        return arrival

    def _fetch(self, number: int, worker: int) -> int:
        """The time at which `number` can compute; if its weights are remote, fetch them first."""
        before = self.recent_starts[worker]
        k = number % self.chain
        stage = min(k, self.chain - 1 - k)
        start = self.now
        if number < self.num_chained and self.weight_units[stage]:
            owner = self.plan.weight[number]
            if owner != worker:
                begin = start
                if self.costs.prefetch:
                    is_full = len(before) == self.costs.prefetch
                    begin = max(before[0] if is_full else 0, self.fetch_free[worker])
                link = self.plan.link(owner, worker)
                if self.costs.fetch_contention:
                    place = owner, link is self.plan.tick_costs.inside
                    busy = self.serving.setdefault(place, [])
                    begin = _book(busy, begin, link.fetches[stage] - link.latency)
                end = begin + link.fetches[stage]
                self.fetch_free[worker] = end
                self.extras.append(Extra(worker, begin, end, "FETCH", number))
                start = max(start, end)
        before.append(start)
        return start


def _book(busy: list[list[int]], begin: int, length: int) -> int:
    """The first time from `begin` at which `length` ticks are free, which are then busy.

    `busy` has the [start, end] that are not free, in order. Those that touch become one.
    """
    at = bisect_right(busy, begin, key=lambda taken: taken[1])
    while at < len(busy) and busy[at][0] < begin + length:
        begin = busy[at][1]
        at += 1
    if length:
        busy.insert(at, [begin, begin + length])
        if at + 1 < len(busy) and busy[at + 1][0] == busy[at][1]:
            busy[at][1] = busy.pop(at + 1)[1]
        if at and busy[at - 1][1] == busy[at][0]:
            busy[at - 1][1] = busy.pop(at)[1]
    return begin


# The ready work of each worker: `put` adds a work item that can start, `take` removes the one that
# its worker runs next.


class InOrder:
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


class ByPriority:
    """The ready work in one heap per worker, which takes the item with the smallest key."""

    def __init__(self, num_workers: int, keys: Sequence[int], modulus: int) -> None:
        """`keys[number] % modulus` is `number`; weight gradients are the numbers beyond."""
        self.keys, self.modulus = keys, modulus
        self.heaps: list[list[int]] = [[] for _ in range(num_workers)]

    def put(self, number: int, worker: int) -> None:
        heappush(self.heaps[worker], self._key(number))

    def take(self, worker: int) -> int | None:
        heap = self.heaps[worker]
        return heappop(heap) % self.modulus if heap else None

    def _key(self, number: int) -> int:
        return self.keys[number] if number < len(self.keys) else self._last_key + number

    @cached_property
    def _last_key(self) -> int:
        """Weight gradients have the lowest priority: they fill the bubbles."""
        return self.modulus * (1 + max(self.keys) // self.modulus)


class Capped(ByPriority):
    """Like ByPriority, but forwards have their own heap; a worker needs `room` to take one."""

    def __init__(
        self, room: list[float], num_stages: int, keys: Sequence[int], modulus: int
    ) -> None:
        super().__init__(len(room), keys, modulus)
        self.stages, self.chain = num_stages, 2 * num_stages
        self.room = room
        self.forwards: list[list[int]] = [[] for _ in room]

    def put(self, number: int, worker: int) -> None:
        is_forward = number < len(self.keys) and number % self.chain < self.stages
        heaps = self.forwards if is_forward else self.heaps
        heappush(heaps[worker], self._key(number))

    def take(self, worker: int) -> int | None:
        heap, forwards = self.heaps[worker], self.forwards[worker]
        if forwards and self.room[worker] > 0 and not (heap and heap[0] < forwards[0]):
            self.room[worker] -= 1
            heap = forwards
        return heappop(heap) % self.modulus if heap else None

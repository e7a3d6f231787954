"""Greedy list scheduling in virtual time, event by event.

Time jumps from one event to the next: a work ends, its data arrives, a worker is free again. At
each, every free worker with works that could start takes the one its priority puts first, or the
next one of its order. One heap holds the distinct times, a bucket each time's events, and a heap a
worker the works that are ready: n works take about n log(n) steps, whatever the strategy.
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
    """Time a worker spent on moving data for a work: `kind` is "FETCH" or "SEND"."""

    worker: int
    start: float
    end: float
    kind: str
    work: int


@dataclass
class Plan:
    """All that the engine needs to know, works by number (see placement.py).

    Number `num_chained + batch * num_stages + stage` is the weight gradient of a backward pass
    that is split; `is_split` says which are, by the number of the weight gradient from
    `num_chained` on. `priority_key(work)` orders works that are ready at once, `orders` (by
    worker) fixes them, `max_in_flight` (by worker) holds back forwards while as many are on their
    way.
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
    durations: list[float] = field(init=False)
    weight_durations: list[float] = field(init=False)

    def __post_init__(self) -> None:
        per_stage = self.costs.per_stage
        forward = per_stage("forward", self.num_stages)
        self.weight_durations = per_stage("weight_gradient", self.num_stages)
        backward = per_stage("backward", self.num_stages)
        self.durations = forward + backward[::-1]
        for stage, (part, whole) in enumerate(zip(self.weight_durations, backward, strict=True)):
            if part > whole:
                raise SimulationError(
                    f"costs: weight_gradient of stage {stage} is {part}, more than the whole "
                    f"backward pass, {whole}"
                )

    @property
    def num_chained(self) -> int:
        return 2 * self.num_stages * self.num_batches

    def weight_gradient(self, backward: int) -> int:
        """The number of the weight gradient that belongs to `backward`."""
        batch, k = divmod(backward, 2 * self.num_stages)
        return self.num_chained + batch * self.num_stages + 2 * self.num_stages - 1 - k

    def backward_of(self, number: int) -> int:
        """The backward that a weight gradient or a forward belongs to."""
        if number >= self.num_chained:
            batch, stage = divmod(number - self.num_chained, self.num_stages)
        else:
            batch, stage = divmod(number, 2 * self.num_stages)
        return (batch * 2 + 2) * self.num_stages - 1 - stage

    def worker(self, number: int) -> int:
        return self.compute[number if number < self.num_chained else self.backward_of(number)]

    def duration(self, number: int) -> float:
        """Compute time of a work; a split backward's is without its weight gradient."""
        if number >= self.num_chained:
            return self.weight_durations[(number - self.num_chained) % self.num_stages]
        k = number % (2 * self.num_stages)
        if k >= self.num_stages and self.is_split[self.weight_gradient(number) - self.num_chained]:
            return self.durations[k] - self.weight_durations[2 * self.num_stages - 1 - k]
        return self.durations[k]


def run(plan: Plan) -> tuple[list[float | None], list[Extra]]:
    """Start of every work by number (None for one that never starts), and the extra time.

    Weight gradients follow the other works, and have a place there even if none is split.
    """
    stages, chain, num_chained = plan.num_stages, 2 * plan.num_stages, plan.num_chained
    compute, durations, costs, is_split = plan.compute, plan.durations, plan.costs, plan.is_split
    splits = any(is_split)
    total = num_chained + (len(is_split) if splits else 0)
    starts: list[float | None] = [None] * total
    extras: list[Extra] = []

    key_of, orders, caps = plan.priority_key, plan.orders, plan.max_in_flight
    last_key = 1 << 62  # weight gradients come after all others: they fill what is left
    ready: list[list[int]] = [[] for _ in range(plan.num_workers)]
    capped: list[list[int]] = [[] for _ in range(plan.num_workers)]
    in_flight = [0] * plan.num_workers
    position = [0] * plan.num_workers
    is_ready = bytearray(total)
    idle = bytearray(b"\1" * plan.num_workers)

    network, overlap = costs.network, costs.overlap_transfers
    port_free: list[float] = [0] * plan.num_workers
    weight_units = costs.per_stage("weight_units", stages)
    fetches = network is not None and any(weight_units)
    fetch_free: list[float] = [0] * plan.num_workers
    recent_starts: list[deque[float]] = [deque(maxlen=costs.prefetch) for _ in idle]

    # An event is a work that ends (its number), data that arrives (~number) or a worker that is
    # free after a transfer (total + worker).
    times: list[float] = [0]
    events: dict[float, list[int]] = {0: [~first for first in range(0, num_chained, chain)]}

    def post(time: float, event: int) -> None:
        bucket = events.get(time)
        if bucket is None:
            events[time] = [event]
            heappush(times, time)
        else:
            bucket.append(event)

    def make_ready(number: int, worker: int) -> None:
        if orders is not None:
            is_ready[number] = 1
        elif number >= num_chained:
            heappush(ready[worker], last_key * total + number)
        else:
            heap = capped if caps is not None and number % chain < stages else ready
            heappush(heap[worker], key_of(number) * total + number)  # type: ignore[misc]

    def take_next(worker: int) -> int | None:
        """The work that `worker` starts now, if there is one."""
        if orders is not None:
            order, at = orders[worker], position[worker]
            if at == len(order) or not is_ready[order[at]]:
                return None
            position[worker] = at + 1
            return order[at]
        heap = ready[worker]
        if caps is not None:
            forwards = capped[worker]
            if (
                forwards
                and in_flight[worker] < caps[worker]
                and not (heap and heap[0] < forwards[0])
            ):
                in_flight[worker] += 1
                heap = forwards
        return heappop(heap) % total if heap else None

    def transfer(number: int, successor: int, worker: int, target: int) -> None:
        """Send what `number` made; the successor is ready, or the sender free, once it is there."""
        assert network is not None
        link = network.link(worker, target)
        if overlap:
            sent = max(now, port_free[worker]) + costs.activation_units * link.seconds_per_unit
            port_free[worker] = sent
            arrival = sent + link.latency_seconds
        else:
            arrival = now + link.seconds(costs.activation_units)
            if arrival > now:
                idle[worker] = 0
                extras.append(Extra(worker, now, arrival, "SEND", number))
                post(arrival, total + worker)
        if arrival > now:
            post(arrival, ~successor)
        else:
            make_ready(successor, target)
            touched.append(target)

    def fetch(number: int, worker: int) -> float:
        """When `number` can compute: once its weights, if they are kept elsewhere, have come."""
        home = plan.weight[number]
        stage = min(number % chain, chain - 1 - number % chain)
        if home == worker or not weight_units[stage]:
            return now
        if costs.prefetch:
            before = recent_starts[worker]
            begin = max(before[0] if len(before) == costs.prefetch else 0, fetch_free[worker])
        else:
            begin = now
        assert network is not None
        end = begin + network.link(home, worker).seconds(weight_units[stage])
        fetch_free[worker] = end
        extras.append(Extra(worker, begin, end, "FETCH", number))
        return max(now, end)

    while times:
        now = heappop(times)
        touched = []
        for event in events.pop(now):
            if event < 0:
                number = ~event
                worker = compute[number]
                make_ready(number, worker)
                touched.append(worker)
            elif event >= total:
                worker = event - total
                idle[worker] = 1
                touched.append(worker)
            else:
                # A work ends: its worker is free, and its successor or successors can start.
                number = event
                worker = compute[number] if number < num_chained else plan.worker(number)
                idle[worker] = 1
                touched.append(worker)
                if number >= num_chained:
                    batch, stage = divmod(number - num_chained, stages)
                    opener = compute[batch * chain + stage]
                    in_flight[opener] -= 1
                    touched.append(opener)
                    continue
                k = number % chain
                if k >= stages and (splits or caps is not None):
                    weight_gradient = plan.weight_gradient(number)
                    if is_split[weight_gradient - num_chained]:
                        make_ready(weight_gradient, worker)
                    elif caps is not None:
                        opener = compute[number - 2 * (k - stages) - 1]
                        in_flight[opener] -= 1
                        touched.append(opener)
                if k + 1 < chain:
                    target = compute[number + 1]
                    if target == worker or network is None:
                        make_ready(number + 1, target)
                        touched.append(target)
                    else:
                        transfer(number, number + 1, worker, target)
        for worker in touched:
            if not idle[worker]:
                continue
            chosen = take_next(worker)
            if chosen is None:
                continue
            idle[worker] = 0
            start = fetch(chosen, worker) if fetches and chosen < num_chained else now
            if fetches:
                recent_starts[worker].append(start)
            starts[chosen] = start
            k = chosen % chain
            if splits and (chosen >= num_chained or k >= stages):
                post(start + plan.duration(chosen), chosen)
            else:
                post(start + durations[k], chosen)
    return starts, extras

"""The ready work of each worker: by priority, with a limit on work in flight, or in a fixed order.

`put` adds a work item that can start; `take` removes the one that its worker runs next.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from heapq import heappop, heappush


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

"""A simulated GPU: it computes, sends and receives in virtual time, and records its events.

Its clock is exact (exact.py), so two times that are equal compare as equal in any unit. A
`GPU(global_rank)` on its own only adds up time. In a `Cluster`, its messages also carry values and
arrive with the delay of the network, so the results can be compared with a single process.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from titanlite.tools.simulate.exact import Exact, Number, exact
from titanlite.tools.simulate.network import Link, Network
from titanlite.tools.simulate.work import SimulationError

SECONDS_PER_COMPUTE_UNIT = 0.1
NETWORK_BASE_LATENCY_SECONDS = 0.05
SECONDS_PER_DATA_UNIT = 0.01
SECONDS_PER_MEMORY_UNIT = 0.0001

ETHERNET = Network(Link(NETWORK_BASE_LATENCY_SECONDS, SECONDS_PER_DATA_UNIT))


class GPUEvent(NamedTuple):
    """`kind` is compute, send, receive, wait, barrier or join; `work` (pass, layer, item) or None.

    `start` and `end` are the floats nearest to the exact times. An event that `is_overlapped` runs
    beside the GPU's computation, see `GPU.overlapped`.
    """

    kind: str
    description: str
    start: float
    end: float
    work: tuple[str, int, int] | None = None
    is_overlapped: bool = False


class Messages(Protocol):
    """The part of Cluster that a GPU uses: send a message, and receive the next one."""

    def put(self, source: int, target: int, arrival_seconds: Exact, value: Any) -> None: ...

    def take(self, source: int, target: int, description: str) -> tuple[Exact, Any]: ...

    def sleep(self, seconds: float) -> None: ...


class GPU:
    """One device: `clock` is its exact time, `events` its history, `peak_memory_units` its peak."""

    def __init__(
        self,
        global_rank: int,
        cluster: Messages | None = None,
        *,
        network: Network = ETHERNET,
        memory_units: Number = math.inf,
        sleep: bool = False,
    ) -> None:
        self.global_rank = global_rank
        self.clock: Exact = 0
        self.events: list[GPUEvent] = []
        self.peak_memory_units = 0.0
        self._overlapped: Exact = 0
        self._is_overlapped = False
        self.memory_units = memory_units
        if memory_units != math.inf:
            exact(memory_units, "memory_units")
        self._cluster = cluster
        self._network = network
        self._sleep = sleep
        self._held: dict[str, Exact] = {}
        self._spent: defaultdict[str, Exact] = defaultdict(int)

    @property
    def seconds(self) -> float:
        """The time on its clock."""
        return float(self.clock)

    def compute(
        self,
        description: str,
        compute_units: Number,
        *,
        memory_units: Number = 0,
        work: tuple[str, int, int] | None = None,
    ) -> None:
        """Compute for the time of the arithmetic or of the memory traffic, whichever is longer.

        `memory_units` is the amount read and written. This is the roofline model, Williams et al.
        2009, https://doi.org/10.1145/1498765.1498785.
        """
        arithmetic = self._product("compute_units", compute_units, SECONDS_PER_COMPUTE_UNIT)
        traffic = self._product("memory_units", memory_units, SECONDS_PER_MEMORY_UNIT)
        self._spend("compute", description, max(arithmetic, traffic), work)

    def send(
        self, target_rank: int, description: str, data_size_units: Number, value: Any = None
    ) -> None:
        """Send `value`; the GPU is busy for the link's latency plus the transfer time."""
        size = exact(data_size_units, f"GPU {self.global_rank}: data_size_units of {description}")
        link = self._network.link(self.global_rank, target_rank)
        self._spend("send", description, link.seconds(size))
        if self._cluster is not None:
            self._cluster.put(self.global_rank, target_rank, self.clock, value)

    def receive(self, source_rank: int, description: str, data_size_units: Number = 0) -> Any:
        """Wait for the next message from `source_rank`, acknowledge it (one latency), return it.

        The sender pays for the transfer, so `data_size_units` costs nothing here.
        """
        value = self._take(source_rank, description)
        link = self._network.link(source_rank, self.global_rank)
        self._spend("receive", description, link.seconds(0))
        return value

    def exchange(
        self,
        target_rank: int,
        source_rank: int,
        description: str,
        data_size_units: Number,
        value: Any,
    ) -> Any:
        """Send to one rank while receiving from another: the receive overlaps the send."""
        self.send(target_rank, description, data_size_units, value)
        return self._take(source_rank, description)

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Messages inside the block take no time of the GPU: they are sent beside its computation.

        They start when the block is entered, after the messages of earlier such blocks. Other
        messages do not slow them down. `join` waits for them.
        """
        computed = self.clock
        self.clock = max(computed, self._overlapped)
        self._is_overlapped = True
        try:
            yield
        finally:
            self._overlapped, self.clock = self.clock, computed
            self._is_overlapped = False

    def join(self, description: str) -> None:
        """Wait until all messages of `overlapped` blocks have been sent and received."""
        if self._overlapped > self.clock:
            self._spend("join", description, self._overlapped - self.clock)

    def barrier(self, ranks: Sequence[int], description: str = "barrier") -> None:
        """Wait until all `ranks` reach the barrier, plus one latency."""
        first = ranks[0]
        if self._cluster is None or len(ranks) == 1:
            return
        begin = self.clock
        if self.global_rank == first:
            arrivals = [self._cluster.take(rank, first, description)[1] for rank in ranks[1:]]
            link = self._network.slowest_link(list(ranks))
            leave = max(begin, *arrivals) + link.seconds(0)
            for rank in ranks[1:]:
                self._cluster.put(first, rank, leave, leave)
        else:
            self._cluster.put(self.global_rank, first, begin, begin)
            leave = self._cluster.take(first, self.global_rank, description)[1]
        self._spend("barrier", description, leave - begin)

    def allocate(self, description: str, memory_units: Number) -> None:
        """Allocate memory until `free`. Raises SimulationError if the device runs out of memory."""
        units = exact(memory_units, f"GPU {self.global_rank}: memory_units of {description}")
        self._held[description] = self._held.get(description, 0) + units
        held = sum(self._held.values())
        if self.memory_units != math.inf and held > exact(self.memory_units, "memory_units"):
            raise SimulationError(
                f"GPU {self.global_rank} is out of memory: with {description} it needs "
                f"{float(held):g} of {float(self.memory_units):g} units"
            )
        self.peak_memory_units = max(self.peak_memory_units, float(held))

    def free(self, description: str) -> None:
        """Free all memory allocated under `description`."""
        if description not in self._held:
            raise SimulationError(
                f"GPU {self.global_rank} cannot free {description}: it is not allocated"
            )
        del self._held[description]

    def seconds_in(self, *kinds: str) -> float:
        """Time spent in events of `kinds`, without those that were overlapped."""
        return float(self.time_in(*kinds))

    def time_in(self, *kinds: str) -> Exact:
        """The same time, exactly."""
        return sum(self._spent[kind] for kind in kinds)

    def _take(self, source_rank: int, description: str) -> Any:
        if self._cluster is None:
            return None
        arrival, value = self._cluster.take(source_rank, self.global_rank, description)
        if arrival > self.clock:
            self._spend("wait", description, arrival - self.clock)
        return value

    def _product(self, name: str, units: Number, seconds_per_unit: float) -> Exact:
        return exact(units, f"GPU {self.global_rank}: {name}") * exact(seconds_per_unit, "seconds")

    def _spend(
        self,
        kind: str,
        description: str,
        seconds: Exact,
        work: tuple[str, int, int] | None = None,
    ) -> None:
        start = self.seconds
        self.clock += seconds
        if not self._is_overlapped:
            self._spent[kind] += seconds
        event = GPUEvent(kind, description, start, self.seconds, work, self._is_overlapped)
        self.events.append(event)
        # In real time, waits need no sleep: the thread itself has waited for the message. What is
        # overlapped is slept through by `join`, as far as it outlasts the computation.
        if self._sleep and kind not in ("wait", "barrier") and not self._is_overlapped:
            (time.sleep if self._cluster is None else self._cluster.sleep)(float(seconds))

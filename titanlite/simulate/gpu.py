"""A simulated GPU: it computes, sends and receives in virtual time, and remembers what it did.

A `GPU(global_rank)` alone charges time, as a paper calculation would. As part of a `Cluster` its
messages carry values and arrive when the network lets them, so that what is computed can be
compared with one process, not only how long it took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from titanlite.simulate.network import Link, Network
from titanlite.simulate.work import SimulationError

SECONDS_PER_COMPUTE_UNIT = 0.1
NETWORK_BASE_LATENCY_SECONDS = 0.05
SECONDS_PER_DATA_UNIT = 0.01
SECONDS_PER_MEMORY_UNIT = 0.0001

ETHERNET = Network(Link(NETWORK_BASE_LATENCY_SECONDS, SECONDS_PER_DATA_UNIT))


class Event(NamedTuple):
    """`kind` is compute, send, receive, wait or barrier; `work` is (pass, layer, item), if any."""

    kind: str
    description: str
    start: float
    end: float
    work: tuple[str, int, int] | None = None


class Messages(Protocol):
    """What a GPU needs of its Cluster: to leave a message for a rank, and to take the next one."""

    def put(self, source: int, target: int, arrival_seconds: float, value: Any) -> None: ...

    def take(self, source: int, target: int, description: str) -> tuple[float, Any]: ...


class GPU:
    """One device. `seconds` is its clock, `events` its past, `peak_memory_units` its high water."""

    def __init__(
        self,
        global_rank: int,
        cluster: Messages | None = None,
        *,
        network: Network = ETHERNET,
        memory_units: float = float("inf"),
        sleep: bool = False,
    ) -> None:
        self.global_rank = global_rank
        self.seconds = 0.0
        self.events: list[Event] = []
        self.peak_memory_units = 0.0
        self.memory_units = memory_units
        self._cluster = cluster
        self._network = network
        self._sleep = sleep
        self._held: dict[str, float] = {}

    def compute(
        self,
        description: str,
        compute_units: float,
        *,
        memory_units: float = 0,
        work: tuple[str, int, int] | None = None,
    ) -> None:
        """Compute for as long as the arithmetic or the memory traffic takes, whichever is longer.

        `memory_units` are read and written meanwhile: the roofline model, Williams et al. 2009,
        https://doi.org/10.1145/1498765.1498785.
        """
        arithmetic = compute_units * SECONDS_PER_COMPUTE_UNIT
        traffic = memory_units * SECONDS_PER_MEMORY_UNIT
        self._spend("compute", description, max(arithmetic, traffic), work)

    def send(
        self, target_rank: int, description: str, data_size_units: float, value: Any = None
    ) -> None:
        """Send `value` and be busy for the link's latency and the data's way through it."""
        link = self._network.link(self.global_rank, target_rank)
        self._spend("send", description, link.seconds(data_size_units))
        if self._cluster is not None:
            self._cluster.put(self.global_rank, target_rank, self.seconds, value)

    def receive(self, source_rank: int, description: str, data_size_units: float = 0) -> Any:
        """Wait for the next message of `source_rank`, acknowledge it (one latency), return it.

        Its data came while its sender was sending, so that `data_size_units` costs nothing here.
        """
        value = self._take(source_rank, description)
        link = self._network.link(source_rank, self.global_rank)
        self._spend("receive", description, link.latency_seconds)
        return value

    def exchange(
        self,
        target_rank: int,
        source_rank: int,
        description: str,
        data_size_units: float,
        value: Any,
    ) -> Any:
        """Send to one rank while receiving from another: the receive is hidden by the send."""
        self.send(target_rank, description, data_size_units, value)
        return self._take(source_rank, description)

    def barrier(self, ranks: Sequence[int], description: str = "barrier") -> None:
        """Go on only when all `ranks` have come here, one latency after the last of them."""
        first = ranks[0]
        if self._cluster is None or len(ranks) == 1:
            return
        begin = self.seconds
        if self.global_rank == first:
            arrivals = [self._cluster.take(rank, first, description)[1] for rank in ranks[1:]]
            link = self._network.slowest_link(list(ranks))
            leave = max(begin, *arrivals) + link.latency_seconds
            for rank in ranks[1:]:
                self._cluster.put(first, rank, leave, leave)
        else:
            self._cluster.put(self.global_rank, first, begin, begin)
            leave = self._cluster.take(first, self.global_rank, description)[1]
        self._spend("barrier", description, leave - begin)

    def allocate(self, description: str, memory_units: float) -> None:
        """Hold memory until `free`. Raises SimulationError if the device has no room for it."""
        self._held[description] = self._held.get(description, 0) + memory_units
        held = sum(self._held.values())
        if held > self.memory_units:
            raise SimulationError(
                f"GPU {self.global_rank} is out of memory: {description} makes it hold {held:g} of "
                f"{self.memory_units:g} units"
            )
        self.peak_memory_units = max(self.peak_memory_units, held)

    def free(self, description: str) -> None:
        """Give back all that was allocated under `description`."""
        if description not in self._held:
            raise SimulationError(f"GPU {self.global_rank} holds no {description} to free")
        del self._held[description]

    def seconds_in(self, *kinds: str) -> float:
        """Time spent in events of `kinds`."""
        return sum(event.end - event.start for event in self.events if event.kind in kinds)

    def _take(self, source_rank: int, description: str) -> Any:
        if self._cluster is None:
            return None
        arrival, value = self._cluster.take(source_rank, self.global_rank, description)
        if arrival > self.seconds:
            self._spend("wait", description, arrival - self.seconds)
        return value

    def _spend(
        self,
        kind: str,
        description: str,
        seconds: float,
        work: tuple[str, int, int] | None = None,
    ) -> None:
        if seconds < 0:
            raise SimulationError(f"GPU {self.global_rank}: {description} takes {seconds:g} s")
        start, self.seconds = self.seconds, self.seconds + seconds
        self.events.append(Event(kind, description, start, self.seconds, work))
        # With real sleeping, waiting is already done by the thread itself.
        if self._sleep and kind not in ("wait", "barrier"):
            time.sleep(seconds)

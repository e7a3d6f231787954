"""A simulated GPU: it computes, sends and receives in virtual time, and records its events.

Its clock is exact (exact.py), so two times that are equal compare as equal in any unit. A
`GPU(global_rank)` on its own only adds up time. In a `Cluster`, its messages also carry values and
arrive with the delay of the network, so the results can be compared with a single process.

All GPUs of a cluster run the same program, with one thread per GPU. Every receive names its source,
and messages between two ranks keep their order. Results and clocks therefore do not depend on the
order in which threads run (a Kahn process network).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from titanlite.ranks.turns import Happening, Turns
from titanlite.schedule.walk import Span
from titanlite.tools.figures.timeline import REDUCE, Timeline
from titanlite.tools.simulate.exact import Exact, Number, exact
from titanlite.tools.simulate.network import Link, Network
from titanlite.tools.simulate.work import SimulationError

SECONDS_PER_COMPUTE_UNIT = 0.1
NETWORK_BASE_LATENCY_SECONDS = 0.05
SECONDS_PER_DATA_UNIT = 0.01
SECONDS_PER_MEMORY_UNIT = 0.0001

ETHERNET = Network(Link(NETWORK_BASE_LATENCY_SECONDS, SECONDS_PER_DATA_UNIT))

Result = TypeVar("Result")


class GPUEvent(NamedTuple):
    """`kind` is compute, send, receive, wait or join; `work` (pass, layer, item) or None.

    `start` and `end` are the floats nearest to the exact times. An event that `is_overlapped` runs
    beside the GPU's computation, see `GPU.overlapped`.
    """

    kind: str
    description: str
    start: float
    end: float
    work: tuple[str, int, int] | None = None
    is_overlapped: bool = False


class GPU:
    """One device: `clock` is its exact time, `events` its history, `peak_memory_units` its peak."""

    def __init__(
        self, global_rank: int, cluster: Cluster | None = None, *, network: Network = ETHERNET
    ) -> None:
        self.global_rank = global_rank
        self.clock: Exact = 0
        self.events: list[GPUEvent] = []
        self.peak_memory_units = 0.0
        self._overlapped: Exact = 0
        self._is_overlapped = False
        self._cluster = cluster
        self._network = network
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

    def allocate(self, description: str, memory_units: Number) -> None:
        """Allocate memory until `free`."""
        units = exact(memory_units, f"GPU {self.global_rank}: memory_units of {description}")
        self._held[description] = self._held.get(description, 0) + units
        held = float(sum(self._held.values()))
        self.peak_memory_units = max(self.peak_memory_units, held)

    def free(self, description: str) -> None:
        """Free all memory allocated under `description`."""
        if description not in self._held:
            raise SimulationError(
                f"GPU {self.global_rank} cannot free {description}: it is not allocated"
            )
        del self._held[description]

    def time_in(self, *kinds: str) -> Exact:
        """The exact time spent in events of `kinds`, without those that were overlapped."""
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
        self, kind: str, description: str, seconds: Exact, work: tuple[str, int, int] | None = None
    ) -> None:
        start = self.seconds
        self.clock += seconds
        if not self._is_overlapped:
            self._spent[kind] += seconds
        event = GPUEvent(kind, description, start, self.seconds, work, self._is_overlapped)
        self.events.append(event)
        # In real time, waits need no sleep: the thread itself has waited for the message. What is
        # overlapped is slept through by `join`, as far as it outlasts the computation.
        if self._cluster is not None and kind != "wait" and not self._is_overlapped:
            self._cluster.pass_time(float(seconds))


class Cluster:
    """`num_ranks` GPUs on one network, in virtual time, or in real time if `sleep`."""

    def __init__(self, num_ranks: int, network: Network = ETHERNET, *, sleep: bool = False) -> None:
        if num_ranks < 1:
            raise SimulationError(f"num_ranks is {num_ranks}; a cluster needs at least one rank")
        self.gpus = [GPU(rank, self, network=network) for rank in range(num_ranks)]
        self._sleeps = sleep

    @property
    def seconds(self) -> float:
        """The time at which the last GPU finished."""
        return float(self.clock)

    @property
    def clock(self) -> Exact:
        """The same time, exactly."""
        return max(gpu.clock for gpu in self.gpus)

    def run(self, program: Callable[[GPU], Result]) -> list[Result]:
        """Run `program(gpu)` on every rank and return the results, by rank.

        Re-raises the exception of the first rank that fails. If the ranks deadlock, raises
        SimulationError, which names the message that each rank waits for.
        """
        self._turns = Turns(len(self.gpus), self._deadlock)
        self._mail: dict[tuple[int, int], deque[tuple[Exact, Any]]] = {}
        self._arrivals: dict[tuple[int, int], Happening] = {}
        results = self._turns.run(lambda rank: program(self.gpus[rank]))
        if self._turns.failure is not None:
            raise self._turns.failure[1]
        return results

    def put(self, source: int, target: int, arrival_seconds: Exact, value: Any) -> None:
        """Send `value` to `target`, where it arrives at `arrival_seconds`."""
        if not 0 <= target < len(self.gpus):
            raise SimulationError(
                f"GPU {source} sends to rank {target}; ranks are 0 to {len(self.gpus) - 1}"
            )
        self._mail.setdefault((source, target), deque()).append((arrival_seconds, value))
        if (arrival := self._arrivals.pop((source, target), None)) is not None:
            self._turns.happen(arrival)

    def take(self, source: int, target: int, description: str) -> tuple[Exact, Any]:
        """Block until the next message from `source` is sent; return its arrival time and value."""
        if not 0 <= source < len(self.gpus):
            raise SimulationError(
                f"GPU {target} receives from rank {source}; ranks are 0 to {len(self.gpus) - 1}"
            )
        mail = self._mail.setdefault((source, target), deque())
        if not mail:
            what = f"rank {target} waits for {description} from rank {source}"
            arrival = self._arrivals[source, target] = Happening(what)
            self._turns.wait_for(arrival)
        return mail.popleft()

    def pass_time(self, seconds: float) -> None:
        """Let the other ranks run for this time, if the cluster runs in real time."""
        if self._sleeps:
            self._turns.sleep(seconds)

    def timeline(self, title: str) -> Timeline:
        """The timeline of all GPUs: passes by layer and microbatch, messages in grey.

        Messages that are sent beside the computation have a lane of their own.
        """
        spans = []
        for gpu in self.gpus:
            for event in gpu.events:
                if event.kind == "compute" and event.work is not None:
                    kind, layer, item = event.work
                    spans.append(Span(gpu.global_rank, event.start, event.end, kind, layer, item))
                elif event.kind in ("send", "receive"):
                    kind = REDUCE if event.is_overlapped else "SEND"
                    spans.append(Span(gpu.global_rank, event.start, event.end, kind))
        rows = [f"rank {gpu.global_rank}" for gpu in self.gpus]
        return Timeline(title, rows, spans, unit="s")

    def _deadlock(self) -> tuple[int, BaseException]:
        waits = self._turns.waits()
        listed = "; ".join(one.what for _, one in sorted(waits.items()) if one is not None)
        return min(waits), SimulationError(f"the ranks deadlock: {listed}")

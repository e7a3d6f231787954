"""Simulated GPUs that run the same program and exchange messages, with one thread per GPU.

Every receive names its source, and messages between two ranks keep their order. Results and clocks
therefore do not depend on the order in which threads run (a Kahn process network).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from titanlite.ranks.turns import Happening, Turns
from titanlite.schedule.timeline import REDUCE, Span, Timeline
from titanlite.tools.simulate.exact import Exact, Number
from titanlite.tools.simulate.gpu import ETHERNET, GPU
from titanlite.tools.simulate.network import Network
from titanlite.tools.simulate.work import SimulationError

Result = TypeVar("Result")


class Cluster:
    """`num_ranks` GPUs on one network, in virtual time, or in real time if `sleep`.

    `memory_units` is the memory of each GPU.
    """

    def __init__(
        self,
        num_ranks: int,
        network: Network = ETHERNET,
        *,
        memory_units: Number = math.inf,
        sleep: bool = False,
    ) -> None:
        if num_ranks < 1:
            raise SimulationError(f"num_ranks is {num_ranks}; a cluster needs at least one rank")
        self.gpus = [
            GPU(rank, self, network=network, memory_units=memory_units, sleep=sleep)
            for rank in range(num_ranks)
        ]
        self._turns = self._new_turns()
        self._mail: dict[tuple[int, int], deque[tuple[Exact, Any]]] = {}
        self._arrivals: dict[tuple[int, int], Happening] = {}

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
        self._turns, self._mail, self._arrivals = self._new_turns(), {}, {}
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

    def sleep(self, seconds: float) -> None:
        """Let the other ranks run for this real time."""
        self._turns.sleep(seconds)

    def timeline(self, title: str) -> Timeline:
        """The timeline of all GPUs: passes by layer and item, messages in grey.

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
        rows = [f"GPU {gpu.global_rank}" for gpu in self.gpus]
        return Timeline(title, rows, spans, unit="s", batches_are="item")

    def _new_turns(self) -> Turns:
        return Turns(len(self.gpus), self._deadlock)

    def _deadlock(self) -> tuple[int, BaseException]:
        waits = self._turns.waits()
        listed = "; ".join(one.what for _, one in sorted(waits.items()) if one is not None)
        return min(waits), SimulationError(f"the ranks deadlock: {listed}")

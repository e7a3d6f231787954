"""Simulated GPUs that run the same program and exchange messages, with one thread per GPU.

Every receive names its source, and messages between two ranks keep their order. Results and clocks
therefore do not depend on the order in which threads run (a Kahn process network).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

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
        self._lock = threading.Lock()
        self._arrived = [threading.Condition(self._lock) for _ in self.gpus]
        self._mail: dict[tuple[int, int], deque[tuple[Exact, Any]]] = {}
        self._waiting: dict[int, tuple[int, str]] = {}
        self._running: set[int] = set()
        self._failure: BaseException | None = None

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
        results: list[Any] = [None] * len(self.gpus)
        self._running = set(range(len(self.gpus)))
        self._waiting, self._mail, self._failure = {}, {}, None

        def run_rank(gpu: GPU) -> None:
            try:
                results[gpu.global_rank] = program(gpu)
            except BaseException as error:
                with self._lock:
                    self._fail(error)
            with self._lock:
                self._running.discard(gpu.global_rank)
                self._check_progress()

        threads = [threading.Thread(target=run_rank, args=(gpu,), daemon=True) for gpu in self.gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return results

    def put(self, source: int, target: int, arrival_seconds: Exact, value: Any) -> None:
        """Send `value` to `target`, where it arrives at `arrival_seconds`."""
        if not 0 <= target < len(self.gpus):
            raise SimulationError(
                f"GPU {source} sends to rank {target}; ranks are 0 to {len(self.gpus) - 1}"
            )
        with self._lock:
            self._mail.setdefault((source, target), deque()).append((arrival_seconds, value))
            if self._waiting.get(target, (None,))[0] == source:
                del self._waiting[target]
                self._arrived[target].notify()

    def take(self, source: int, target: int, description: str) -> tuple[Exact, Any]:
        """Block until the next message from `source` is sent; return its arrival time and value."""
        if not 0 <= source < len(self.gpus):
            raise SimulationError(
                f"GPU {target} receives from rank {source}; ranks are 0 to {len(self.gpus) - 1}"
            )
        with self._lock:
            mail = self._mail.setdefault((source, target), deque())
            while not mail:
                if self._failure is None:
                    self._waiting[target] = source, description
                    self._check_progress()
                if self._failure is not None:
                    raise _Stopped
                self._arrived[target].wait()
            return mail.popleft()

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

    def _check_progress(self) -> None:
        if self._running and self._failure is None and self._running <= self._waiting.keys():
            listed = "; ".join(
                f"rank {rank} waits for {description} from rank {source}"
                for rank, (source, description) in sorted(self._waiting.items())
            )
            self._fail(SimulationError(f"the ranks deadlock: {listed}"))

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
        for condition in self._arrived:
            condition.notify()


class _Stopped(Exception):
    """Stops the blocked ranks after another rank has failed."""

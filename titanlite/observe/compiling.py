"""Reports when torch.compile compiles, which pauses a run for seconds or minutes."""

import time
from collections.abc import Callable
from typing import Any

from torch._dynamo.callback import callback_handler


class CompileMonitor:
    """`with CompileMonitor("4 blocks with inductor", say): ...`, and `end_step` after each step.

    Calls `say` with a line when Dynamo starts, in the first forward pass, and again if a later step
    needs new graphs, such as the first validation. `what` describes what is compiled. The time is
    that of this process; all ranks compile their graphs at the same time.
    """

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._num_graphs = 0
        self._seconds = 0.0
        self._started: float | None = None
        self._has_compiled = False

    def __enter__(self) -> "CompileMonitor":
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        return self

    def __exit__(self, *error: object) -> None:
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)

    def end_step(self) -> None:
        """Report the time taken if anything was compiled since the last call."""
        if not self._num_graphs:
            return
        graphs = "1 graph" if self._num_graphs == 1 else f"{self._num_graphs} graphs"
        self._say(f"compiled: {graphs} in {self._seconds:.1f} s")
        self._num_graphs, self._seconds, self._has_compiled = 0, 0.0, True

    def _start(self, _: Any) -> None:
        if not self._num_graphs:
            again = " again" if self._has_compiled else ""
            self._say(f"compiling {self._what}{again} ...")
        self._started = time.perf_counter()

    def _end(self, _: Any) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._num_graphs += 1
            self._started = None

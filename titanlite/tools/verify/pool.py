"""A pool of local ranks that run one function after the other.

    with RankPool(4) as pool:
        results = pool.call(function, *args)    # function(world, *args) on each, in rank order

Starting ranks takes seconds, and verifying a small plan takes less, so plans share a pool.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from titanlite.ranks.launch import Place, Ranks, not_done

# A job's process groups live as long as the processes, since DTensor's caches hold its meshes. Each
# has three gloo threads that wake up now and then: after a hundred jobs a rank is six times slower.
CALLS_A_START = 16


class RankPool:
    """`num_ranks` local processes with a process group; restarted after a call that failed.

    `close`, or leaving the context manager, ends the processes.
    """

    def __init__(
        self,
        num_ranks: int,
        device_type: str = "cpu",
        *,
        timeout_seconds: float = 300,
        max_ranks: int | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self.max_ranks = max_ranks
        self.device_type = device_type
        self.timeout_seconds = timeout_seconds
        self._ranks: Ranks | None = None
        self._num_calls = 0
        self._is_busy = False

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close(now=error[0] is not None)

    def start(self) -> Ranks:
        """The processes, started if none run or their process groups have become too many.

        Returns before the ranks are ready, so that the caller can do other work meanwhile.
        """
        if self._num_calls == CALLS_A_START:
            self.close()
        if self._ranks is None:
            self._num_calls = 0
            serve = functools.partial(_serve, device_type=self.device_type)
            self._ranks = Ranks(serve, self.num_ranks, self.max_ranks)
        return self._ranks

    @property
    def is_busy(self) -> bool:
        """Whether a call was submitted whose results have not been taken."""
        return self._is_busy

    def call(self, function: Callable[..., Any] | str, *args: Any) -> list[Any]:
        """Run `function(world, *args)` on each rank; returns the results in rank order.

        A function given as "module:function" is imported on the ranks only. Raises RankError, and
        ends all ranks, if one raises, dies or exceeds the timeout.
        """
        self.submit(function, *args)
        return self.results()

    def submit(self, function: Callable[..., Any] | str, *args: Any) -> None:
        """Start a call, whose results `results` returns; there is one call at a time."""
        assert not self._is_busy
        ranks = self.start()
        self._num_calls += 1
        self._is_busy = True
        message = cloudpickle.dumps((function, args))
        for rank in range(self.num_ranks):
            ranks.send(rank, message)

    def results(self) -> list[Any]:
        """Wait for the submitted call, at most for the timeout from now; see `call`."""
        ranks = self._ranks
        assert ranks is not None
        assert self._is_busy
        self._is_busy = False
        answers: dict[int, bytes] = {}
        deadline = time.monotonic() + self.timeout_seconds
        try:
            while pending := set(range(self.num_ranks)) - set(answers):
                received = ranks.receive(pending, deadline)
                if not received:
                    raise not_done(pending, self.timeout_seconds)
                answers.update(received)
        except BaseException:
            self.close(now=True)
            raise
        return [cloudpickle.loads(answers[rank]) for rank in range(self.num_ranks)]

    def dismiss(self) -> None:
        """Let the processes end; `close` waits for them."""
        if self._ranks is not None:
            self._ranks.dismiss()

    def close(self, *, now: bool = False) -> None:
        """End the processes: at once with `now`, else after each has left its process group."""
        ranks, self._ranks = self._ranks, None
        self._is_busy = False
        if ranks is not None:
            if now:
                ranks.terminate()
            ranks.close()


def _serve(place: Place, connection: Connection, device_type: str) -> None:
    from titanlite.ranks.world import open_world

    with open_world(place, device_type) as world:
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            function, args = cloudpickle.loads(message)
            if isinstance(function, str):
                module, _, name = function.partition(":")
                function = getattr(importlib.import_module(module), name)
            connection.send(("message", cloudpickle.dumps(function(world, *args))))

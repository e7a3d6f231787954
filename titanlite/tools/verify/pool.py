"""Pools of local ranks that run one function after the other.

    with RankPool(4) as pool:
        results = pool.call(function, *args)    # function(world, *args) on each, in rank order

Starting ranks takes seconds, and verifying a small plan takes less, so plans share a pool.
Functions are sent by cloudpickle. A caller without torch sends a name, which the rank imports
(on_rank.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from titanlite import pickles
from titanlite.errors import RankError, TitanliteError
from titanlite.ranks.launch import Place, Ranks, spawn
from titanlite.ranks.machine import check_local_ranks, needs_threads
from titanlite.registry import load

if TYPE_CHECKING:
    from titanlite.ranks.world import World

    P = ParamSpec("P")
    R = TypeVar("R")
    Function: TypeAlias = Callable[Concatenate[World, P], R]
    """What ranks call with their World and further arguments; on_rank.py has names for some."""

# A job's process groups live as long as the processes, since DTensor's caches hold its meshes; with
# their threads and sockets.
CALLS_A_START = 64


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """`num_ranks` local processes with a process group; restarted after a call that failed.

    `close`, or leaving the context manager, ends the processes.
    """

    are_threads = False

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
        self.is_busy = False
        """Whether a call was submitted whose results have not been taken."""

    def __exit__(self, *error: Any) -> None:
        self.close(now=error[0] is not None)

    def start(self) -> None:
        """Start the processes, if none run or their process groups have become too many.

        Returns before the ranks are ready, so that the caller can do other work meanwhile.
        """
        if self._num_calls == CALLS_A_START:
            self.close()
        if self._ranks is None:
            self._num_calls = 0
            serve = functools.partial(_serve, device_type=self.device_type)
            self._ranks = Ranks(serve, self.num_ranks, self.max_ranks)

    def call(self, function: Function[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `function(world, *args)` on each rank; returns the results in rank order.

        Raises RankError, and ends all ranks, if one raises, dies or exceeds the timeout.
        """
        return self.submit(function, *args, **kwargs)()

    def submit(
        self, function: Function[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        """Start a call; returns a function that waits for its results, to call before the next.

        It waits at most for the timeout, from when it is called.
        """
        assert not self.is_busy
        self.start()
        assert self._ranks is not None
        self._num_calls += 1
        self.is_busy = True
        message = pickles.dumps((function, args, kwargs))
        for rank in range(self.num_ranks):
            self._ranks.send(rank, message)
        return self._results

    def _results(self) -> list[Any]:
        assert self._ranks is not None
        assert self.is_busy
        self.is_busy = False
        try:
            return self._ranks.receive_all(self.timeout_seconds)
        except BaseException:
            self.close(now=True)
            raise

    def dismiss(self) -> None:
        """Let the processes end; `close` waits for them."""
        if self._ranks is not None:
            for rank in range(self.num_ranks):
                self._ranks.send(rank, b"")

    def close(self, *, now: bool = False) -> None:
        """End the processes: at once with `now`, else after each has left its process group."""
        ranks, self._ranks = self._ranks, None
        self.is_busy = False
        if ranks is not None:
            if now:
                ranks.terminate()
            ranks.close()


class ThreadPool(RankPool):
    """`num_ranks` ranks that are threads of this process; each call has new ones."""

    are_threads = True

    def start(self) -> None:
        """Nothing: threads start at once."""
        check_local_ranks(self.num_ranks, allowed=self.max_ranks, are_threads=True)

    def submit(
        self, function: Function[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Callable[[], list[R]]:
        """Prepare a call; it runs when its results are asked for."""
        assert not self.is_busy
        self.start()
        self.is_busy = True

        def run() -> list[Any]:
            self.is_busy = False
            most = self.max_ranks
            arguments = (self.device_type, function, args, kwargs)
            return spawn(_on_thread, self.num_ranks, *arguments, max_ranks=most, threads=True)

        return run


def _on_thread(place: Place, device_type: str, function: Any, args: Any, kwargs: Any) -> Any:
    from titanlite.ranks.world import open_world

    with open_world(place, device_type) as world:
        return load(function)(world, *args, **kwargs)


class RankPools(contextlib.AbstractContextManager["RankPools"]):
    """A pool for each number of ranks that is asked for; leaving the context manager ends all.

    With `threads`, the ranks are threads of this process, in which no timeout is needed; if it is
    None, those are that are too many for processes.
    """

    def __init__(
        self,
        device_type: str = "cpu",
        *,
        timeout_seconds: float = 300,
        max_ranks: int | None = None,
        threads: bool | None = False,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._threads, self._max_ranks = threads, max_ranks
        self._options: dict[str, Any] = {
            "device_type": device_type,
            "timeout_seconds": timeout_seconds,
            "max_ranks": max_ranks,
        }
        self._pools: dict[int, RankPool] = {}
        self._exits = contextlib.ExitStack()

    def __exit__(self, *error: Any) -> None:
        if error[0] is None:
            # The ranks of all pools end at the same time.
            for pool in self._pools.values():
                pool.dismiss()
        self._exits.__exit__(*error)

    def of(self, num_ranks: int) -> RankPool:
        """The pool of `num_ranks` ranks; it starts them at its first call."""
        if num_ranks not in self._pools:
            threads = self._threads
            if threads is None:
                threads = needs_threads(num_ranks, self._max_ranks)
            pool = (ThreadPool if threads else RankPool)(num_ranks, **self._options)
            self._pools[num_ranks] = self._exits.enter_context(pool)
        return self._pools[num_ranks]

    def alone(self, function: Function[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `function(world, *args)` on one process."""
        (result,) = self.of(1).call(function, *args, **kwargs)
        return result

    @contextlib.contextmanager
    def closing_busy(self) -> Iterator[None]:
        """On an error inside, end the ranks whose results have no reader any more."""
        try:
            yield
        except BaseException:
            for pool in self._pools.values():
                if pool.is_busy:
                    pool.close(now=True)
            raise


@contextlib.contextmanager
def must_run(what: str) -> Iterator[None]:
    """An error of the reference's process becomes a TitanliteError, which is no finding."""
    try:
        yield
    except RankError as error:
        text = f"{error.rank_traceback}\n{what} on one process: {error.message}"
        raise TitanliteError(text.strip()) from error


def _serve(place: Place, connection: Connection, device_type: str) -> None:
    from titanlite.ranks.world import open_world
    from titanlite.tools.verify.gloo import share_device

    share_device()
    with open_world(place, device_type) as world:
        while True:
            try:
                message = connection.recv_bytes()
            except EOFError:
                return
            if not message:
                return
            function, args, kwargs = pickles.loads(message)
            connection.send(("message", pickles.dumps(load(function)(world, *args, **kwargs))))

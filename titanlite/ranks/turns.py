"""Ranks as threads of one process that take turns: one runs, until it waits for another.

    turns = Turns(num_ranks)
    results = turns.run(function)            # function(rank) on a thread for each rank

A rank that must wait calls `wait_for(event)`, and the next rank that can go on does. So every run
takes the same turns, a debugger stops the whole world, and a world in which no rank can go on is
known at that moment, without a timeout. This module does not import torch.
"""

import ctypes
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_here = threading.local()


class WorldEnded(BaseException):
    """Raised in a waiting rank once another one has failed; no `except Exception` stops it."""


class Happening:
    """Something that ranks may wait for; it happens once."""

    def __init__(self, what: Any = None) -> None:
        self.what = what
        """What a report says of it."""
        self.has_happened = False
        self.mark: Any = None  # what the rank that made it happen has left for those that waited
        self.waiting: list[int] = []


@dataclass(eq=False)
class _Rank:
    number: int
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    waits_for: Happening | None = None
    is_done: bool = False
    result: Any = None


class Turns:
    """The threads of `num_ranks` ranks.

    `on_enter(rank)` and `on_leave(rank)` are called on the thread of a rank as its turn begins and
    ends. `stuck()` makes the error of a world in which no rank can go on, and the number of the
    rank whose error it is.
    """

    def __init__(
        self,
        num_ranks: int,
        stuck: Callable[[], tuple[int, BaseException]],
        on_enter: Callable[[int], None] = lambda rank: None,
        on_leave: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._ranks = [_Rank(number) for number in range(num_ranks)]
        self._ready = deque(self._ranks)
        self._stuck, self._on_enter, self._on_leave = stuck, on_enter, on_leave
        # When it ends, a number to order those that end together, and what happens then.
        self._sleeping: list[tuple[float, int, Happening]] = []
        self._numbers = itertools.count()
        self._all_done = threading.Event()
        self._has_ended = False
        self.failure: tuple[int, BaseException] | None = None
        """The rank that failed first, and its error."""

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Call `function(rank)` on the thread of each rank; returns the results in rank order.

        If one raises, the others are ended where they wait; `failure` then says which. An error
        raised here, such as KeyboardInterrupt, ends all ranks.
        """
        for rank in self._ranks:
            rank.thread = threading.Thread(
                target=self._serve, args=(rank, function), name=f"rank {rank.number}", daemon=True
            )
            rank.thread.start()
        self._give_turn()
        try:
            self._all_done.wait()
        except BaseException:
            self._interrupt()
            raise
        finally:
            for rank in self._ranks:
                assert rank.thread is not None
                rank.thread.join()
        # Of worlds that have ended, torch keeps the groups.
        return [vars(rank).pop("result") for rank in self._ranks]

    def wait_for(self, happening: Happening) -> None:
        """Let other ranks run until it has happened; called on a rank's thread."""
        if happening.has_happened:
            return
        rank = self._ranks[current_rank()]
        self._check_world()
        rank.waits_for = happening
        happening.waiting.append(rank.number)
        self._wake()
        if not self._ready:
            self._end(*self._stuck())
        self._on_leave(rank.number)
        self._give_turn()
        rank.turn.acquire()
        self._on_enter(rank.number)
        self._check_world()
        rank.waits_for = None

    def sleep(self, seconds: float) -> None:
        """Let other ranks run for this time; called on a rank's thread."""
        happening = Happening(f"{seconds:g} seconds to pass")
        until = time.monotonic() + seconds
        heapq.heappush(self._sleeping, (until, next(self._numbers), happening))
        self.wait_for(happening)

    def happen(self, happening: Happening) -> None:
        """The ranks that wait for it take their turns, in the order in which they came."""
        happening.has_happened = True
        self._ready.extend(self._ranks[number] for number in happening.waiting)
        happening.waiting.clear()

    def waits(self) -> dict[int, Happening | None]:
        """What each rank that has not returned waits for; None for one that could go on."""
        return {one.number: one.waits_for for one in self._ranks if not one.is_done}

    def thread_of(self, rank: int) -> int:
        thread = self._ranks[rank].thread
        assert thread is not None
        assert thread.ident is not None
        return thread.ident

    def _check_world(self) -> None:
        if self._has_ended:
            raise WorldEnded

    def _wake(self) -> None:
        """Let those go on whose time has come; if no other rank can, wait for the first of them."""
        while self._sleeping and (not self._ready or self._sleeping[0][0] <= time.monotonic()):
            until, _, happening = heapq.heappop(self._sleeping)
            time.sleep(max(0.0, until - time.monotonic()))
            self.happen(happening)

    def _give_turn(self) -> None:
        while self._ready:
            rank = self._ready.popleft()
            if not rank.is_done:
                rank.turn.release()
                return
        self._all_done.set()

    def _serve(self, rank: _Rank, function: Callable[[int], Any]) -> None:
        _here.rank = rank.number
        rank.turn.acquire()
        failure = None
        try:
            if not self._has_ended:
                self._on_enter(rank.number)
                rank.result = function(rank.number)
        except WorldEnded:
            pass
        except BaseException as error:
            failure = rank.number, error
        rank.is_done = True
        self._on_leave(rank.number)
        self._wake()
        if failure is not None:
            self._end(*failure)
        elif not self._ready and self.waits():
            self._end(*self._stuck())
        self._give_turn()

    def _end(self, number: int, error: BaseException) -> None:
        """Note the first failure, and let every rank take a turn, in which it is ended."""
        self.failure = self.failure or (number, error)
        self._has_ended = True
        self._ready.extend(one for one in self._ranks if one not in self._ready)

    def _interrupt(self) -> None:
        """End the rank that runs at its next line of Python, and the others in their turns."""
        for number in self.waits():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.thread_of(number)), ctypes.py_object(WorldEnded)
            )
        self._end(-1, WorldEnded())


def current_rank() -> int:
    """The rank whose thread this is. Raises LookupError on any other thread."""
    rank: int | None = getattr(_here, "rank", None)
    if rank is None:
        raise LookupError("this thread is not the thread of a rank")
    return rank


def is_rank() -> bool:
    return getattr(_here, "rank", None) is not None

"""Find the best plan of a job for a number of ranks of some hardware.

    Space -> plans -> evaluate.py, in worker processes -> SearchResult

First, every combination of degrees, schedule, microbatch size, activation checkpointing and FSDP's
policy is a candidate; with CPU offload too, if it does not fit without. Then the layouts of the
best plans are changed one at a time, as long as that gives better ones; what helps is tried with
every other plan of the same TP and CP degrees. A plan is dropped if it does not fit in memory, or
if its lower bounds (bounds.py) exclude it. When a search is interrupted, what was found so far
remains.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from titanlite.config import JobConfig
from titanlite.ranks.signals import handling
from titanlite.tools.planner.bounds import Frontier
from titanlite.tools.planner.evaluate import DOES_NOT_FIT, Evaluator, FailedPlan, FoundPlan, Result
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.space import CP, EP, TP, Space, groups, without_layouts

BEST = 10
ENOUGH_SLOWER = 2
REACH = 2.0
"""Layouts are changed of plans that take at most this many times as long as the fastest."""
MORE_CP = "more context parallelism, which was slower"


@dataclass
class SearchResult:
    """What a search has found; `dropped` counts the plans that were not timed, by reason."""

    num_candidates: int = 0
    found: list[FoundPlan] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: list[FailedPlan] = field(default_factory=list)
    is_complete: bool = False
    most_tokens_per_second: float | None = None
    """What no plan exceeds for a rank; None if that is not known."""

    @property
    def best(self) -> list[FoundPlan]:
        """The plans with the most tokens per second, each with its fastest layouts only."""
        fastest: dict[frozenset[tuple[str, Any]], FoundPlan] = {}
        for one in self._sorted():
            fastest.setdefault(without_layouts(one.changes), one)
            if len(fastest) == BEST:
                break
        return list(fastest.values())

    @property
    def front(self) -> list[FoundPlan]:
        """The plans that no other beats in both memory and time, from the fastest on."""
        front: list[FoundPlan] = []
        for one in self._sorted():
            if not front or one.peak_bytes < front[-1].peak_bytes:
                front.append(one)
        return front

    def _sorted(self) -> list[FoundPlan]:
        return sorted(self.found, key=lambda one: (one.seconds, one.peak_bytes))


def search(
    space: Space,
    hardware: Hardware,
    *,
    is_compiled: bool = False,
    use_cache: bool = True,
    num_workers: int = 1,
    exhaustive: bool = False,
    on_progress: Callable[[SearchResult, int], None] = lambda *_: None,
) -> SearchResult:
    """Evaluate the plans of `space`; the best ones are evaluated once more, exactly.

    Plans are taken by their context-parallel degree. Once the best of two degrees in turn is slower
    than the best before, larger degrees are dropped, unless `exhaustive`.
    `on_progress(result, done)` is called as plans are done. An interrupt ends the search, and its
    workers, with what it has found.
    """
    settings = space.config, hardware, is_compiled, use_cache
    # A forked worker would inherit locks of threads.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start, settings)
    run = _Search(space, pool, num_workers, on_progress)
    with pool:
        try:
            run.degrees(exhaustive=exhaustive)
            run.offload()
            run.layouts()
            run.exactly()
            run.result.is_complete = True
        except KeyboardInterrupt:
            # A worker's group of plans can take minutes.
            for worker in dict(pool._processes or {}).values():
                worker.kill()
            pool.shutdown(cancel_futures=True)
    return run.result


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Inside, only the first SIGINT or SIGTERM raises; `timeout -s INT` sends two."""
    first = iter([True])

    def interrupt(number: int, _frame: object) -> None:
        if next(first, False):
            raise KeyboardInterrupt(number)

    with handling(interrupt, signal.SIGINT, signal.SIGTERM):
        yield


class _Search:
    """The stages of a search; each adds to `result`."""

    def __init__(
        self,
        space: Space,
        pool: ProcessPoolExecutor,
        num_workers: int,
        on_progress: Callable[[SearchResult, int], None],
    ) -> None:
        self._space, self._pool, self._num_workers = space, pool, num_workers
        self._on_progress = on_progress
        self._plans = list(space.candidates())
        self._tried = {_identity(plan) for plan in self._plans}
        self._done = 0
        self._too_large: list[dict[str, Any]] = []
        self.result = SearchResult(len(self._plans))

    def degrees(self, *, exhaustive: bool) -> None:
        """Evaluate all candidates, those with less context parallelism first."""
        result, slower = self.result, 0
        by_cp: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for plan in self._plans:
            by_cp[plan[CP]].append(plan)
        for cp, plans in sorted(by_cp.items()):
            if slower == ENOUGH_SLOWER and not exhaustive:
                result.dropped[MORE_CP] += len(plans)
                self._done += len(plans)
                continue
            fastest = min((one.seconds for one in result.found), default=math.inf)
            self._evaluate(plans)
            own = min((o.seconds for o in result.found if o.changes[CP] == cp), default=math.inf)
            # If none was timed because all are slower by their bounds, they are slower.
            slower = slower + 1 if own > fastest else 0

    def offload(self) -> None:
        """Evaluate the plans that do not fit in memory with CPU offload."""
        left, self._too_large = self._too_large, []
        self._evaluate_new(new for plan in left for new in self._space.offloaded(plan))

    def layouts(self) -> None:
        """Change one layout of each of the best plans, until no such change gives a better one.

        The best are the fastest, those on the front, and at first the fastest of each TP, CP and EP
        degree; all within REACH. The layouts of a new plan among the fastest are tried with all
        plans of the same degrees.
        """
        changed: set[int] = set()
        further = self._fastest_of_degrees()
        while True:
            best = {id(one): one for one in (*self.result.best, *self.result.front, *further)}
            limit = REACH * min((one.seconds for one in best.values()), default=0.0)
            left = [
                one.changes
                for key, one in best.items()
                if key not in changed and one.seconds <= limit
            ]
            if not left:
                return
            changed |= best.keys()
            further = []
            self._evaluate_new(new for plan in left for new in self._space.neighbours(plan))
            models = [one.changes for one in self.result.best if id(one) not in changed]
            self._evaluate_new(
                self._space.with_layouts_of(plan, model)
                for model in models
                for plan in self._plans
                if _degrees(plan) == _degrees(model)
            )

    def exactly(self) -> None:
        """Evaluate the best plans in full, until none of the best is extrapolated."""
        exact: set[int] = set()
        result = self.result
        while left := [one for one in result.best if id(one) not in exact]:
            result.found = [one for one in result.found if one not in left]
            before = len(result.found)
            self._take(self._pool.map(_evaluate_exactly, [one.changes for one in left]))
            exact |= {id(one) for one in result.found[before:]}

    def _fastest_of_degrees(self) -> list[FoundPlan]:
        """The fastest plan of each TP, CP and EP degree."""
        fastest: dict[tuple[int, ...], FoundPlan] = {}
        for one in sorted(self.result.found, key=lambda one: one.seconds, reverse=True):
            fastest[_degrees(one.changes)] = one
        return list(fastest.values())

    def _evaluate_new(self, plans: Iterable[dict[str, Any]]) -> None:
        """Evaluate further plans that were not tried before."""
        new = {_identity(plan): plan for plan in plans}
        new = {key: plan for key, plan in new.items() if key not in self._tried}
        self._tried |= new.keys()
        self.result.num_candidates += len(new)
        self._evaluate(list(new.values()))

    def _evaluate(self, plans: Sequence[dict[str, Any]]) -> None:
        """Evaluate plans in the workers, by groups, each pruned by what was found until then."""
        left = groups(plans)[::-1]
        running: dict[Future[list[Result]], list[dict[str, Any]]] = {}
        while left or running:
            while left and len(running) < self._num_workers:
                group = left.pop()
                found = [
                    (without_layouts(one.changes), one.seconds, one.peak_bytes)
                    for one in (*self.result.best, *self.result.front)
                ]
                # A new worker is deaf to a Ctrl-C, also while it starts.
                signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                running[self._pool.submit(_evaluate, group, found)] = group
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                group, rows = running.pop(future), future.result()
                self._done += len(group)
                self._take(rows)
                self._too_large += [
                    plan for plan, row in zip(group, rows, strict=True) if row == DOES_NOT_FIT
                ]
                self._on_progress(self.result, self._done)

    def _take(self, rows: Iterable[Result]) -> None:
        for row in rows:
            if isinstance(row, str):
                self.result.dropped[row] += 1
            elif isinstance(row, FailedPlan):
                self.result.failures.append(row)
            else:
                self.result.found.append(row)


def _degrees(plan: Mapping[str, Any]) -> tuple[int, ...]:
    """The degrees that the passes of a block depend on."""
    return plan[TP], plan[CP], plan.get(EP, 1)


def _identity(plan: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    return frozenset(plan.items())


_evaluator: Evaluator | None = None


def _start(config: JobConfig, hardware: Hardware, is_compiled: bool, use_cache: bool) -> None:
    """Prepare a worker. Ctrl-C reaches it too, and is the parent's to handle."""
    global _evaluator
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _evaluator = Evaluator(config, hardware, is_compiled=is_compiled, use_cache=use_cache)


def _evaluate(
    plans: list[dict[str, Any]], found: Sequence[tuple[Hashable, float, int]]
) -> list[Result]:
    assert _evaluator is not None
    return list(_evaluator.evaluate_all(plans, Frontier(BEST, found)))


def _evaluate_exactly(plan: dict[str, Any]) -> Result:
    assert _evaluator is not None
    return _evaluator.evaluate(plan, exactly=True)

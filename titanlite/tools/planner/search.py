"""Find the best plan of a job for a number of ranks of some hardware.

    Space -> plans -> evaluate.py, in worker processes -> SearchResult

First, each set of degrees is evaluated once, with the choices that take the least memory, and with
more sequences if its calls, not its work, take the time. Then what is near the fastest plans of
different sets is evaluated, round by round, until nothing near them is left: plans with one other
choice (schedule, microbatch size, activation checkpointing, FSDP's policy, replicas and shards,
asynchronous TP), then those that did not fit with CPU offload, then those with another layout. A
plan is dropped if it does not fit in memory, or if its lower bounds (bounds.py) exclude it. When a
search is interrupted, what was found so far remains.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from typing import Any, NamedTuple

from titanlite.config import JobConfig
from titanlite.ranks.signals import handling
from titanlite.tools.planner.bounds import Frontier, TooLarge
from titanlite.tools.planner.evaluate import (
    DOES_NOT_FIT,
    NOT_TRIED,
    Evaluator,
    FailedPlan,
    FoundPlan,
    Result,
)
from titanlite.tools.planner.hardware import Hardware
from titanlite.tools.planner.space import (
    CP,
    REPLICATE,
    RESHARD,
    SHARD,
    Space,
    are_near,
    choices_of,
    degrees_of,
    groups,
    passes_of,
    sizes_of,
    without_layouts,
)

BEST = 10
ENOUGH_SLOWER = 2
SETS, REACH = 8, 1.3
"""A search goes on from the fastest plans of at most so many sets of degrees, which take at most
so many times as long as the fastest of all."""
LARGER, GAIN = 4, 1.05
"""Up to so many sequences are tried of sets that can be faster by so much than the fastest."""
MORE_CP = "more context parallelism, which was slower"
NOT_NEAR = "not near the fastest plans; --exhaustive tries them"


class Round(NamedTuple):
    """How far a round of a search is, in plans."""

    number: int
    done: int
    total: int


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
        for one in self.sorted():
            fastest.setdefault(without_layouts(one.changes), one)
            if len(fastest) == BEST:
                break
        return list(fastest.values())

    @property
    def front(self) -> list[FoundPlan]:
        """The plans that no other beats in both memory and time, from the fastest on."""
        front: list[FoundPlan] = []
        for one in self.sorted():
            if not front or one.peak_bytes < front[-1].peak_bytes:
                front.append(one)
        return front

    def sorted(self) -> list[FoundPlan]:
        """All plans that were timed, the fastest first."""
        return sorted(self.found, key=lambda one: (one.seconds, one.peak_bytes))


def search(
    space: Space,
    hardware: Hardware,
    *,
    is_compiled: bool = False,
    use_cache: bool = True,
    num_workers: int = 1,
    exhaustive: bool = False,
    on_progress: Callable[[SearchResult, Round], None] = lambda *_: None,
) -> SearchResult:
    """Evaluate plans of `space`; the best ones are evaluated once more, exactly.

    Sets of degrees are taken by their context parallelism. Once the best of two degrees in turn is
    slower than the best before, larger ones are dropped. If `exhaustive`, none is, and all choices
    of each set are evaluated.
    `on_progress` is called as plans are done. An interrupt ends the search, and its workers, with
    what it has found.
    """
    settings = space.config, hardware, is_compiled, use_cache
    # A forked worker would inherit locks of threads.
    pool = ProcessPoolExecutor(num_workers, get_context("spawn"), _start, settings)
    run = _Search(space, pool, num_workers, on_progress, exhaustive=exhaustive)
    with pool:
        try:
            run.degrees()
            run.improve()
            run.exactly()
            run.finish()
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
        on_progress: Callable[[SearchResult, Round], None],
        *,
        exhaustive: bool,
    ) -> None:
        self._space, self._pool, self._num_workers = space, pool, num_workers
        self._on_progress, self._exhaustive = on_progress, exhaustive
        self._candidates = list(space.candidates())
        self._sets: defaultdict[tuple[int, ...], list[dict[str, Any]]] = defaultdict(list)
        self._splits: defaultdict[_Identity, list[dict[str, Any]]] = defaultdict(list)
        for plan in self._candidates:
            self._sets[degrees_of(plan)].append(plan)
            self._splits[choices_of(plan)].append(plan)
        self._known = set(map(_identity, self._candidates))
        self._tried: set[_Identity] = set()
        self._too_large = TooLarge()
        self._not_fitting: list[dict[str, Any]] = []
        self._round = Round(0, 0, 0)
        self.result = SearchResult(len(self._candidates))

    def degrees(self) -> None:
        """Evaluate all sets of degrees, those with less context parallelism first."""
        by_cp: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for plan in self._candidates:
            by_cp[plan[CP]].append(plan)
        every = sorted(by_cp)
        # These are evaluated in any case, and at once, so that no worker is idle.
        first = every if self._exhaustive else every[: ENOUGH_SLOWER + 1]
        self._evaluate(chain(*(by_cp[cp] for cp in first)), one_of_each_set=not self._exhaustive)
        found, fastest, slower = self.result.found, math.inf, 0
        for cp in every:
            if cp not in first and slower == ENOUGH_SLOWER:
                self.result.dropped[MORE_CP] += len(by_cp[cp])
                self._tried.update(map(_identity, by_cp[cp]))
                continue
            if cp not in first:
                self._evaluate(by_cp[cp], one_of_each_set=True)
            own = min((one.seconds for one in found if one.changes[CP] == cp), default=math.inf)
            # If none was timed because all are slower by their bounds, they are slower.
            slower = slower + 1 if own > fastest else 0
            fastest = min(fastest, own)
        if not found:
            self._evaluate(self._candidates)

    def improve(self) -> None:
        """Evaluate what is near the leading plans, until there is nothing new near them."""
        rounds = self._larger, self._near, self._offloaded, self._layouts
        while any(self._evaluate(plans()) for plans in rounds):
            pass

    def exactly(self) -> None:
        """Evaluate the best plans in full, until none of the best is extrapolated."""
        exact: set[int] = set()
        result = self.result
        while left := [one for one in result.best if id(one) not in exact]:
            self._round = Round(self._round.number + 1, 0, len(left))
            self._on_progress(result, self._round)
            result.found = [one for one in result.found if one not in left]
            before = len(result.found)
            for row in self._pool.map(_evaluate_exactly, [one.changes for one in left]):
                self._add(row)
            exact |= {id(one) for one in result.found[before:]}

    def finish(self) -> None:
        """Count the plans that were not tried."""
        if left := len(self._known - self._tried):
            self.result.dropped[NOT_NEAR] = left
        self.result.is_complete = True

    def _leading(self) -> list[FoundPlan]:
        """The plans from which a search goes on: the fastest of different sets of degrees."""
        fastest: dict[tuple[int, ...], FoundPlan] = {}
        for one in self.result.sorted():
            fastest.setdefault(degrees_of(one.changes), one)
        leading = list(fastest.values())[:SETS]
        return [one for one in leading if one.seconds <= REACH * leading[0].seconds]

    def _larger(self) -> Iterator[dict[str, Any]]:
        """Larger microbatches of the sets of degrees that can be the fastest with these.

        If calls take long, one sequence does not show what more of them take.
        """
        every = self.result.sorted()
        fastest = {degrees_of(one.changes): one for one in reversed(every)}
        for degrees, one in fastest.items():
            leading = every[0].seconds
            if one.seconds > REACH * leading and 0 < one.least_seconds < leading / GAIN:
                larger = [
                    plan
                    for plan in self._sets[degrees]
                    if sizes_of(plan)[::2] == sizes_of(one.changes)[::2]
                    and sizes_of(plan)[1] <= LARGER
                    and plan not in self._too_large
                ]
                yield from larger[-1:]

    def _near(self) -> Iterator[dict[str, Any]]:
        """The leading plans with one other choice, split over stages as they are and by default.

        Twice the shards leave memory for such a choice, so both count as one.
        """
        for one in self._leading():
            base = self._space.without_changed_layouts(one.changes)
            wider = {**base, SHARD: 2 * base[SHARD], REPLICATE: base[REPLICATE] / 2}
            sets = self._sets[degrees_of(base)], self._sets[degrees_of(wider)]
            near = [plan for plan in chain(*sets) if are_near(plan, base)]
            near += (
                plan
                for plan in self._splits[choices_of(base)]
                if len({plan.get(RESHARD), base.get(RESHARD)} - {None}) < 2
            )
            for plan in near:
                yield self._space.with_layouts_of(plan, one.changes)
                yield self._space.with_layouts_of(plan, one.changes, is_split=False)

    def _offloaded(self) -> Iterator[dict[str, Any]]:
        """The plans that did not fit in memory, with CPU offload."""
        for plan in tuple(self._not_fitting):
            yield from self._space.offloaded(plan)

    def _layouts(self) -> Iterator[dict[str, Any]]:
        """The leading plans with one other layout.

        Of plans whose blocks have the same passes, only the fastest is changed in all layouts. The
        others take over its layouts, and are split otherwise.
        """
        fastest: dict[tuple[int, ...], FoundPlan] = {}
        for one in self._leading():
            model = fastest.setdefault(passes_of(one.changes), one)
            yield from (self._space.neighbours if model is one else self._space.splits)(one.changes)
            own = self._space.without_changed_layouts(one.changes)
            yield self._space.with_layouts_of(own, model.changes)

    def _evaluate(self, plans: Iterable[dict[str, Any]], *, one_of_each_set: bool = False) -> bool:
        """Evaluate the plans that were not tried before, in the workers; whether there are any.

        They are evaluated by groups, each pruned by what was found until then.
        """
        new = {_identity(plan): plan for plan in plans}
        new = {key: plan for key, plan in new.items() if key not in self._tried}
        self.result.num_candidates += len(new.keys() - self._known)
        self._known |= new.keys()
        self._round = Round(self._round.number + 1, 0, len(new))
        known = [plan for plan in new.values() if plan in self._too_large]
        self._take(known, [DOES_NOT_FIT] * len(known))
        rest = [plan for plan in new.values() if plan not in self._too_large]
        left = groups(rest, by_choices=not one_of_each_set)[::-1]
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
                running[self._pool.submit(_evaluate, group, found, one_of_each_set)] = group
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                self._take(running.pop(future), future.result())
        return bool(new)

    def _take(self, plans: Sequence[dict[str, Any]], rows: Sequence[Result]) -> None:
        tried = [pair for pair in zip(plans, rows, strict=True) if pair[1] != NOT_TRIED]
        for plan, row in tried:
            self._tried.add(_identity(plan))
            self._add(row)
            if row == DOES_NOT_FIT:
                self._too_large.add(plan)
                self._not_fitting.append(plan)
        self._round = self._round._replace(done=self._round.done + len(plans))
        self._on_progress(self.result, self._round)

    def _add(self, row: Result) -> None:
        if isinstance(row, str):
            self.result.dropped[row] += 1
        elif isinstance(row, FailedPlan):
            self.result.failures.append(row)
        else:
            self.result.found.append(row)


_Identity = frozenset[tuple[str, Any]]


def _identity(plan: Mapping[str, Any]) -> _Identity:
    return frozenset(plan.items())


_evaluator: Evaluator | None = None


def _start(config: JobConfig, hardware: Hardware, is_compiled: bool, use_cache: bool) -> None:
    """Prepare a worker. Ctrl-C reaches it too, and is the parent's to handle."""
    global _evaluator
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _evaluator = Evaluator(config, hardware, is_compiled=is_compiled, use_cache=use_cache)


def _evaluate(
    plans: list[dict[str, Any]], found: Sequence[tuple[Hashable, float, int]], one_of_each_set: bool
) -> list[Result]:
    assert _evaluator is not None
    return list(_evaluator.evaluate_all(plans, Frontier(BEST, found), one_of_each_set))


def _evaluate_exactly(plan: dict[str, Any]) -> Result:
    assert _evaluator is not None
    return _evaluator.evaluate(plan, exactly=True)

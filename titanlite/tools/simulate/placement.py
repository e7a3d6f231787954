"""Call the strategy and `needs` once per work item and check what they return.

Work items are numbered in the order in which a batch passes through S stages: number
`batch * 2S + k` is the forward of stage k for k < S, and the backward of stage 2S-1-k for k >= S.
The weight gradient of a split backward runs on the worker of that backward and has no number here.
"""

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.work import (
    ComputeAndWeightWorkers,
    Direction,
    SimulationError,
    Work,
    ask,
    one_line,
)

Strategy = Callable[[Work], ComputeAndWeightWorkers]
Needs: TypeAlias = Callable[[Work], "Iterable[Work]"]

AT_ONCE = 128
ASKED_TWICE = 64
"""The work items for which a function of the user is called again, to see if it is a function."""


def place(
    num_workers: int, num_stages: int, num_batches: int, strategy: Strategy, name: str
) -> tuple[list[int], list[int]]:
    """The compute worker and the weight worker of every work item, by its number.

    Raises SimulationError, which names the work item and the strategy (`name`), if the strategy
    raises, does not return two integers, returns a worker that does not exist, or returns another
    worker when it is called again.
    """
    chain = way_of_a_batch(num_stages)
    compute: list[int] = []
    weight: list[int] = []
    make = tuple.__new__  # three times as fast as Work(...), which matters for millions of calls
    workers = frozenset(range(num_workers))
    # Some at a time, as few as fit into a processor's cache.
    pieces = [chain[at : at + AT_ONCE] for at in range(0, len(chain), AT_ONCE)]
    for batch in range(num_batches):
        for piece in pieces:
            try:
                answers = [
                    strategy(make(Work, (stage, batch, direction))) for stage, direction in piece
                ]
            except Exception:
                works = [Work(stage, batch, direction) for stage, direction in piece]
                for work in works:
                    ask(name, strategy, work)  # which one it is
                raise _changed(name, works[0]) from None
            try:
                computing, storing = zip(*answers, strict=True)
                is_right = (
                    {int}.issuperset(map(type, computing + storing))
                    and workers.issuperset(computing)
                    and workers.issuperset(storing)
                )
            except Exception:
                is_right = False
            if not is_right:
                works = [Work(stage, batch, direction) for stage, direction in piece]
                pairs = map(partial(_pair, num_workers, name), works, answers)
                computing, storing = zip(*pairs, strict=True)
            compute += computing
            weight += storing
    for number in range(0, len(compute), max(1, len(compute) // ASKED_TWICE)):
        batch, k = divmod(number, len(chain))
        work = Work(chain[k][0], batch, chain[k][1])
        again = _pair(num_workers, name, work, ask(name, strategy, work))
        if again != (compute[number], weight[number]):
            raise _changed(name, work)
    return compute, weight


def way_of_a_batch(num_stages: int) -> list[tuple[int, Direction]]:
    """The stage and direction of each work item of a batch: all forwards, then all backwards."""
    forward = [(stage, Direction.FORWARD) for stage in range(num_stages)]
    return forward + [(stage, Direction.BACKWARD) for stage in reversed(range(num_stages))]


def _pair(num_workers: int, name: str, work: Work, answer: Any) -> tuple[int, int]:
    """The two workers that the strategy has returned for `work`, as Python integers."""
    try:
        compute, weight = answer
        if isinstance(compute, bool) or isinstance(weight, bool):
            raise TypeError
        pair = operator.index(compute), operator.index(weight)
    except Exception:
        raise SimulationError(
            f"{name} returns {one_line(repr(answer))} for {work}; "
            "it must return ComputeAndWeightWorkers(compute, weight), two integers"
        ) from None
    for role, worker in zip(("compute", "weight"), pair, strict=True):
        if not 0 <= worker < num_workers:
            raise SimulationError(
                f"{name} puts {work} on {role} worker {worker}; workers are 0 to {num_workers - 1}"
            )
    return pair


def _changed(name: str, work: Work) -> SimulationError:
    return SimulationError(
        f"{name} changes its answer when it is called again for {work}; it must return the same "
        "workers for the same work item"
    )


def read_needs(plan: Plan, needs: Needs) -> dict[int, list[int]]:
    """The numbers of the work items that each work item needs besides its predecessor.

    Raises SimulationError, which names the work item, if `needs` raises, lists something else,
    or lists other work when it is called again.
    """
    found: dict[int, list[int]] = {}
    for number in range(plan.num_chained):
        if numbers := _numbers(plan, needs, number):
            found[number] = numbers
    for number in range(0, plan.num_chained, max(1, plan.num_chained // ASKED_TWICE)):
        if _numbers(plan, needs, number) != found.get(number, []):
            raise SimulationError(
                f"needs changes its answer when it is called again for {plan.work(number)}; it "
                "must list the same work"
            )
    return found


def _numbers(plan: Plan, needs: Needs, number: int) -> list[int]:
    """The numbers of what a work item needs besides its predecessor, in order."""
    work = plan.work(number)
    listed = ask("needs", lambda one: list(needs(one)), work)
    numbers = {plan.read(item, f"needs: {work} needs") for item in listed}
    # A batch passes through its stages in order anyway.
    numbers.discard(number - 1 if number % (2 * plan.num_stages) else -1)
    if number in numbers:
        raise SimulationError(f"needs: {work} needs itself; leave it out")
    if max(numbers, default=0) >= plan.num_chained:
        raise SimulationError(f"needs: {work} needs a weight gradient; no other work waits for one")
    return sorted(numbers)

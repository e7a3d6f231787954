"""Call `needs` once per work item: which further outputs it needs, and their count as messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from titanlite.tools.simulate.placement import ASKED_TWICE, way_of_a_batch
from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.work import Direction, SimulationError, Work, ask

Needs: TypeAlias = Callable[[Work], "Iterable[Work]"]


def read_needs(plan: Plan, needs: Needs) -> dict[int, list[int]]:
    """The numbers of the work items that each work item needs besides its predecessor.

    Raises SimulationError, which names the work item, if `needs` raises, lists something else,
    or lists other work when it is called again.
    """
    way = way_of_a_batch(plan.num_stages)
    found: dict[int, list[int]] = {}
    for number in range(plan.num_chained):
        if numbers := _numbers(plan, needs, way, number):
            found[number] = numbers
    for number in range(0, plan.num_chained, max(1, plan.num_chained // ASKED_TWICE)):
        if _numbers(plan, needs, way, number) != found.get(number, []):
            batch, k = divmod(number, len(way))
            raise SimulationError(
                f"needs changes its answer when it is called again for "
                f"{Work(way[k][0], batch, way[k][1])}; it must list the same work"
            )
    return found


def _numbers(
    plan: Plan, needs: Needs, way: Sequence[tuple[int, Direction]], number: int
) -> list[int]:
    """The numbers of what a work item needs besides its predecessor, in order."""
    batch, k = divmod(number, len(way))
    work = Work(way[k][0], batch, way[k][1])
    listed = ask("needs", lambda one: list(needs(one)), work)
    numbers = {_number(plan, work, item) for item in listed}
    # A batch passes through its stages in order anyway.
    numbers.discard(number - 1 if k else -1)
    if number in numbers:
        raise SimulationError(f"needs: {work} needs itself; leave it out")
    return sorted(numbers)


def _number(plan: Plan, work: Work, item: object) -> int:
    is_work = isinstance(item, tuple) and len(item) == 3
    try:
        stage, batch, direction = Work(*item) if is_work else None  # type: ignore
        is_there = 0 <= stage < plan.num_stages and 0 <= batch < plan.num_batches
        if is_there and direction in (Direction.FORWARD, Direction.BACKWARD):
            return plan.number_of(int(stage), int(batch), direction)
    except TypeError:
        pass
    raise SimulationError(
        f"needs: {work} needs {item!r}; it must be a Work(stage, batch, direction) with a stage of "
        f"0 to {plan.num_stages - 1}, a batch of 0 to {plan.num_batches - 1}, FORWARD or BACKWARD"
    )


def messages_needed(plan: Plan) -> list[int]:
    """By worker, the outputs sent to it that only `needs` asks for."""
    sent = set()
    for number, needed in plan.needs.items():
        target = plan.compute[number]
        for before in needed:
            follower = before + 1
            goes_on = follower % (2 * plan.num_stages) != 0
            is_sent_anyway = goes_on and plan.compute[follower] == target
            if plan.compute[before] != target and not is_sent_anyway:
                sent.add((before, target))
    count = [0] * plan.num_workers
    for _, target in sent:
        count[target] += 1
    return count

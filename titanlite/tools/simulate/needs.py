"""Call `needs` once per work item: which further outputs it needs, and their count as messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from titanlite.tools.simulate.placement import ASKED_TWICE
from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.work import SimulationError, Work, ask

Needs: TypeAlias = Callable[[Work], "Iterable[Work]"]


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

"""Gradient reduction: sum each stage's gradient over the workers that computed or store it."""

from typing import NamedTuple, TypeAlias

from titanlite.tools.simulate.exact import Exact, Time
from titanlite.tools.simulate.network import ring_seconds
from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.work import Direction


class Reduction(NamedTuple):
    """The reduction of the gradient of `stage` over `workers`, from `start` to `end`."""

    stage: int
    workers: list[int]
    start: Time
    end: Time


ReductionTicks: TypeAlias = tuple[int, list[int], Exact, Exact]


def reduce_gradients(plan: Plan, starts: list[int]) -> list[ReductionTicks]:
    """Schedule the reduction of each stage's gradient, in the order in which gradients complete.

    Returns (stage, workers, start, end) of each; times are ticks, or Fractions of ticks where a
    ring divides the data. A worker takes part in one reduction at a time. A reduction that overlaps
    compute starts once the stage's gradient is complete; without overlap, once its workers have
    finished all work.
    """
    network, tick_costs = plan.costs.network, plan.tick_costs
    assert network is not None
    sizes = tick_costs.weight_units
    complete: list[Exact] = [0] * plan.num_stages
    members: list[set[int]] = [set() for _ in range(plan.num_stages)]
    owners: list[set[int]] = [set() for _ in range(plan.num_stages)]
    free: list[Exact] = [0] * plan.num_workers
    for stage, direction, _, ran_on, _, ends in plan.columns(starts):
        if direction != Direction.FORWARD:
            complete[stage] = max(complete[stage], *ends)
            members[stage].update(ran_on)
        if not plan.costs.overlap_transfers:
            for worker, ended in zip(ran_on, ends, strict=True):
                free[worker] = max(free[worker], ended)
    chain = 2 * plan.num_stages
    for stage in range(plan.num_stages):
        owners[stage].update(plan.weight[chain - 1 - stage :: chain])

    reductions: list[ReductionTicks] = []
    for stage in sorted(range(plan.num_stages), key=lambda stage: (complete[stage], -stage)):
        workers = sorted(members[stage] | owners[stage])
        if len(workers) == 1 or not sizes[stage]:
            continue
        link = network.slowest_link(workers)
        kind = "all_reduce" if len(owners[stage]) > 1 else "reduce"
        start: Exact = max(complete[stage], *(free[worker] for worker in workers))
        seconds = ring_seconds(kind, link, len(workers), sizes[stage])
        end = start + tick_costs.ticks.per_unit * seconds
        for worker in workers:
            free[worker] = end
        reductions.append((stage, workers, start, end))
    return reductions

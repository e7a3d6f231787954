"""Gradient reduction: sum each stage's gradient over the workers that computed or store it."""

from __future__ import annotations

from typing import NamedTuple

from titanlite.simulate.engine import Plan
from titanlite.simulate.network import ring_all_reduce_seconds, ring_reduce_seconds


class Reduction(NamedTuple):
    """The reduction of the gradient of `stage` over `workers`, from `start` to `end`."""

    stage: int
    workers: list[int]
    start: float
    end: float


def reduce_gradients(plan: Plan, starts: list[float | None]) -> list[Reduction]:
    """Schedule the reduction of each stage's gradient, in the order in which gradients complete.

    A worker takes part in one reduction at a time. A reduction that overlaps compute starts once
    the stage's gradient is complete; without overlap, once its workers have finished all work.
    """
    network = plan.costs.network
    assert network is not None
    sizes = plan.costs.per_stage("weight_units", plan.num_stages)
    complete: list[float] = [0] * plan.num_stages
    members: list[set[int]] = [set() for _ in range(plan.num_stages)]
    keepers: list[set[int]] = [set() for _ in range(plan.num_stages)]
    free: list[float] = [0] * plan.num_workers
    for number, start in enumerate(starts):
        if start is None:
            continue
        end, worker = start + plan.duration(number), plan.worker(number)
        if not plan.costs.overlap_transfers:
            free[worker] = max(free[worker], end)
        if number >= plan.num_chained:
            stage = (number - plan.num_chained) % plan.num_stages
        else:
            k = number % (2 * plan.num_stages)
            if k < plan.num_stages:
                continue
            stage = 2 * plan.num_stages - 1 - k
            keepers[stage].add(plan.weight[number])
        complete[stage] = max(complete[stage], end)
        members[stage].add(worker)

    reductions = []
    for stage in sorted(range(plan.num_stages), key=lambda stage: (complete[stage], -stage)):
        workers = sorted(members[stage] | keepers[stage])
        if len(workers) == 1 or not sizes[stage]:
            continue
        link = network.slowest_link(workers)
        seconds = ring_all_reduce_seconds if len(keepers[stage]) > 1 else ring_reduce_seconds
        start = max(complete[stage], *(free[worker] for worker in workers))
        end = start + seconds(link, len(workers), sizes[stage])
        for worker in workers:
            free[worker] = end
        reductions.append(Reduction(stage, workers, start, end))
    return reductions

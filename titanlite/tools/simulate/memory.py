"""The memory of each worker over time, by what fills it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titanlite.tools.simulate.engine import Extra
from titanlite.tools.simulate.exact import Exact, Time, simplest
from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.reduction import ReductionTicks
from titanlite.tools.simulate.work import Direction

KINDS = ("weights", "gradients", "optimizer state", "activations", "fetched weights")
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, FETCHED = range(len(KINDS))


def held_inputs(plan: Plan, starts: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The stage inputs that workers hold for backward passes: stage, worker, and from when to when.

    The worker that runs the backward holds the input, from the start of the forward to the end of
    the backward (to the end of the weight gradient if the backward is split).
    """
    chain, any_split = 2 * plan.num_stages, any(plan.is_split)
    for stage in range(plan.num_stages):
        k = chain - 1 - stage
        ends = [start + plan.durations[k] for start in starts[k : plan.num_chained : chain]]
        for batch in range(plan.num_batches) if any_split else ():
            place = batch * plan.num_stages + stage
            if plan.is_split[place]:
                ends[batch] = starts[plan.num_chained + place] + plan.weight_durations[stage]
        begun = starts[stage : plan.num_chained : chain]
        for worker, start, end in zip(plan.compute[k::chain], begun, ends, strict=True):
            yield stage, worker, start, end


class Memory:
    """The memory of each worker over time, by KINDS, in the unit of the sizes in Costs.

    - weights and optimizer state: of each stage that the worker stores, all the time.
    - gradients: of each stage of which it runs a backward, from the first one on. They are kept to
      the end, or to the end of their reduction if another worker stores the weights, which then
      has the sum from the start of the reduction on.
    - activations: what a forward keeps for its backward.
    - fetched weights: from the start of the fetch to the end of the work that needs them.
    """

    def __init__(
        self,
        plan: Plan,
        starts: Sequence[int],
        extras: Sequence[Extra],
        reductions: Sequence[ReductionTicks],
        end: Exact,
    ) -> None:
        """Times are in the ticks of `plan`; `end` is the makespan."""
        self._plan, self._end = plan, end
        self._changes: list[list[tuple[Exact, int, Exact]]] = [[] for _ in range(plan.num_workers)]
        costs, stages = plan.costs, plan.num_stages
        activation = "activation_units" if costs.kept_units is None else "kept_units"
        gradient = "weight_units" if costs.gradient_units is None else "gradient_units"
        weights, gradients, optimizer, kept = (
            costs.per_stage(name, stages)[0]
            for name in ("weight_units", gradient, "optimizer_units", activation)
        )
        for stage, workers in enumerate(plan.owners):
            for worker in workers:
                self._hold(worker, WEIGHTS, weights[stage], 0, end)
                self._hold(worker, OPTIMIZER, optimizer[stage], 0, end)
        self._hold_gradients(gradients, starts, reductions, end)
        for stage, worker, start, stop in held_inputs(plan, starts):
            self._hold(worker, ACTIVATIONS, kept[stage], start, stop)
        if any(weights):
            self._hold_fetched(weights, starts, extras)
        for changes in self._changes:
            changes.sort()

    def _hold(self, worker: int, kind: int, size: Exact, start: Exact, end: Exact) -> None:
        if size and start < end:
            self._changes[worker].append((start, kind, size))
            if end < self._end:
                self._changes[worker].append((end, kind, -size))

    def _hold_gradients(
        self,
        sizes: Sequence[Exact],
        starts: Sequence[int],
        reductions: Sequence[ReductionTicks],
        end: Exact,
    ) -> None:
        plan = self._plan
        first: dict[tuple[int, int], int] = {}
        for stage, direction, batches, workers, begun, _ in plan.columns(starts):
            if direction == Direction.FORWARD:
                continue
            for batch, worker, start in zip(batches, workers, begun, strict=True):
                # The first part of a split backward makes no gradient of weights.
                is_split = plan.is_split[batch * len(sizes) + stage]
                makes = direction == Direction.WEIGHT or not is_split
                if makes and start < first.get((worker, stage), end):
                    first[worker, stage] = start
        reduced = {stage: (start, stop) for stage, _, start, stop in reductions}
        for (worker, stage), start in first.items():
            is_sent = stage in reduced and worker not in plan.owners[stage]
            until = reduced[stage][1] if is_sent else end
            self._hold(worker, GRADIENTS, sizes[stage], start, until)
        for stage, (begin, _) in reduced.items():
            for worker in plan.owners[stage]:
                if (worker, stage) not in first:
                    self._hold(worker, GRADIENTS, sizes[stage], begin, end)

    def _hold_fetched(
        self, sizes: Sequence[Exact], starts: Sequence[int], extras: Sequence[Extra]
    ) -> None:
        plan, chain = self._plan, 2 * self._plan.num_stages
        begun = {extra.work: extra.start for extra in extras if extra.kind == "FETCH"}
        for number, (worker, owner) in enumerate(zip(plan.compute, plan.weight, strict=True)):
            if worker != owner:
                start, k = starts[number], number % chain
                end = start + plan.duration(number)
                size = sizes[min(k, chain - 1 - k)]
                self._hold(worker, FETCHED, size, begun.get(number, start), end)

    def curve(self, worker: int) -> list[tuple[Time, tuple[Time, ...]]]:
        """The corners of a step function: each time at which memory changes, and the size by kind.

        The first corner is at time 0.
        """
        time = self._plan.tick_costs.ticks.time
        return [(time(at), tuple(map(simplest, sizes))) for at, sizes in self._corners(worker)]

    def _corners(self, worker: int) -> Iterator[tuple[Exact, tuple[Exact, ...]]]:
        held: list[Exact] = [0] * len(KINDS)
        at: Exact = 0
        for tick, kind, size in self._changes[worker]:
            if tick != at:
                yield at, tuple(held)
                at = tick
            held[kind] += size
        yield at, tuple(held)

    def at_peak(self, worker: int) -> dict[str, Time]:
        """The size by kind when the worker holds most, the first time."""
        sizes = max((sizes for _, sizes in self._corners(worker)), key=sum)
        return dict(zip(KINDS, map(simplest, sizes), strict=True))

    def peak(self, worker: int) -> Time:
        """The most that the worker holds at once."""
        at: Exact = 0
        held: Exact = 0
        most: Exact = 0
        for tick, _, size in self._changes[worker]:
            if tick != at:
                at, most = tick, max(most, held)
            held += size
        return simplest(max(most, held))

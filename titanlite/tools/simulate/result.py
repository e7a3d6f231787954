"""The result of a simulation: when each work item ran, what it cost, and a lower bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from titanlite.schedule.walk import Span
from titanlite.tools.figures.timeline import Timeline, activation_curves
from titanlite.tools.simulate.engine import Extra
from titanlite.tools.simulate.exact import Exact, Time
from titanlite.tools.simulate.memory import Memory, held_inputs
from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.quantity import show_size, show_time, size_scale, time_scale
from titanlite.tools.simulate.reduction import Reduction, ReductionTicks
from titanlite.tools.simulate.size import check_drawing
from titanlite.tools.simulate.work import Direction

LETTERS = {"F": "f", "B": "b", "I": "b", "W": "w"}


class Cell(NamedTuple):
    """One work item with its times: a cell of the diagram."""

    worker: int
    start: Time
    end: Time
    stage: int
    batch: int
    direction: Direction


class Simulation:
    """The result of `simulate`. Lists have one value per worker, worker 0 first.

    Times are in the unit of the costs (by default 1 step per forward and 2 per backward), and
    exact: integers where they are whole, else Fractions or floats (see Costs). All figures are
    computed on first access.
    """

    def __init__(
        self,
        plan: Plan,
        starts: list[int],
        extras: list[Extra],
        reductions: list[ReductionTicks],
        title: str,
        details: Iterable[str] = (),
    ) -> None:
        """`starts`, `extras` and `reductions` are in the ticks of `plan`.

        `details` are what makes it differ from the default, a few words each.
        """
        self.num_workers = plan.num_workers
        self.num_stages = plan.num_stages
        self.num_batches = plan.num_batches
        self.title = title
        self.details = list(details)
        self.is_by_stage = False  # as the pictures of a Timeline
        self.costs = plan.costs
        self._plan = plan
        self._starts = starts
        self._extras = extras
        self._reductions = reductions
        self._time = plan.tick_costs.ticks.time

    @property
    def makespan(self) -> Time:
        """The time at which all work and all gradient reductions have ended."""
        return self._time(self._makespan)

    @cached_property
    def _makespan(self) -> Exact:
        _, _, last = self._totals
        return max(*last, *(end for _, _, _, end in self._reductions), 0)

    @cached_property
    def cells(self) -> list[Cell]:
        """All work items as (worker, start, end, stage, batch, direction), by worker and time."""
        cells = []
        for stage, direction, batches, workers, starts, ends in self._plan.columns(self._starts):
            for batch, worker, start, end in zip(batches, workers, starts, ends, strict=True):
                cells.append((worker, start, end, stage, batch, direction))
        time = self._time
        return [Cell(cell[0], time(cell[1]), time(cell[2]), *cell[3:]) for cell in sorted(cells)]

    @cached_property
    def reductions(self) -> list[Reduction]:
        """The gradient reductions, in the order in which they run."""
        time = self._time
        return [
            Reduction(stage, workers, time(start), time(end))
            for stage, workers, start, end in self._reductions
        ]

    @cached_property
    def busy(self) -> list[Time]:
        """The compute time of each worker."""
        return [self._time(ticks) for ticks in self._totals[0]]

    @property
    def span(self) -> list[tuple[Time, Time]]:
        """The start of each worker's first work item and the end of its last, (0, 0) if none."""
        _, first, last = self._totals
        return list(zip(map(self._time, first), map(self._time, last), strict=True))

    @cached_property
    def bubble_fraction(self) -> float:
        """The fraction of all workers' time, up to the makespan, in which they do not compute."""
        return 1 - float(sum(self._totals[0]) / (self.num_workers * self._makespan))

    @property
    def throughput(self) -> float:
        """The number of batches per unit of time."""
        return float(self.num_batches * self._plan.tick_costs.ticks.per_unit / self._makespan)

    @cached_property
    def lower_bound(self) -> Time:
        """A lower bound on the makespan of any order of the same work on the same workers.

        The maximum over workers of: the least time before any of its work items can start, plus
        its total compute time, plus the least time that must follow any of its work items.
        """
        plan = self._plan
        stages, network = plan.num_stages, plan.costs.network
        head: dict[int, int] = {}
        tail: dict[int, int] = {}
        for route, split in self._routes:
            lengths = list(plan.durations)
            for stage in range(stages):
                if split[stage]:
                    lengths[2 * stages - 1 - stage] -= plan.weight_durations[stage]
            gaps = [0] * (2 * stages)
            if network is not None:
                for k, (source, target) in enumerate(pairwise(route), 1):
                    if source != target:
                        link = plan.link(source, target)
                        gaps[k] = link.latency + link.transfer
            before = 0
            for worker, length, gap in zip(route, lengths, gaps, strict=True):
                before += gap
                head[worker] = min(head.get(worker, before), before)
                before += length
            after = 0
            for k in reversed(range(2 * stages)):
                stage = 2 * stages - 1 - k
                if stage < stages and split[stage]:
                    tail[route[k]] = 0
                    after = max(after, plan.weight_durations[stage])
                tail[route[k]] = min(tail.get(route[k], after), after)
                after += lengths[k] + gaps[k]
        busy = self._totals[0]
        return self._time(max(head[worker] + busy[worker] + tail[worker] for worker in head))

    @cached_property
    def peak_activations(self) -> list[int]:
        """The most stage inputs that each worker holds at once (see `held_inputs`)."""
        started: list[list[int]] = [[] for _ in range(self.num_workers)]
        released: list[list[int]] = [[] for _ in range(self.num_workers)]
        for _, worker, start, end in held_inputs(self._plan, self._starts):
            started[worker].append(start)
            released[worker].append(end)
        return [_most_at_once(*times) for times in zip(started, released, strict=True)]

    @cached_property
    def memory(self) -> Memory:
        """The memory of each worker over time, by what fills it."""
        return Memory(self._plan, self._starts, self._extras, self._reductions, self._makespan)

    @cached_property
    def peak_memory(self) -> list[Time]:
        """The most memory that each worker uses at once, in the unit of the sizes in Costs."""
        return [self.memory.peak(worker) for worker in range(self.num_workers)]

    @cached_property
    def activation_transmissions(self) -> list[int]:
        """The number of stage inputs sent to each worker or stored for another worker.

        Counts work items whose predecessor ran on another worker, forwards whose backward runs on
        another worker, the first forwards of batches that use more than one worker, and outputs
        that are sent to a worker because of `needs`.
        """
        count = list(self._plan.messages_needed)
        for (route, _), batches in self._routes.items():
            for before, worker in pairwise(route):
                if before != worker:
                    count[worker] += batches
            for k in range(self.num_stages):
                if route[k] != route[-1 - k]:
                    count[route[k]] += batches
            if len(set(route)) > 1:
                count[route[0]] += batches
        return count

    @cached_property
    def weight_transmissions(self) -> list[int]:
        """The number of work items for which a worker does not store the weights."""
        pairs = zip(self._plan.compute, self._plan.weight, strict=True)
        count = Counter(compute for compute, weight in pairs if compute != weight)
        return [count[worker] for worker in range(self.num_workers)]

    @property
    def is_split(self) -> bool:
        """Whether any backward runs its weight gradient separately."""
        return any(self._plan.is_split)

    @cached_property
    def weight_storage(self) -> list[int]:
        """The number of stages whose weights each worker stores."""
        owned = Counter(worker for workers in self._plan.owners for worker in workers)
        return [owned[worker] for worker in range(self.num_workers)]

    @cached_property
    def _routes(self) -> Counter[tuple[tuple[int, ...], bytes]]:
        """The distinct routes (workers of a batch in order, split backwards), with their counts."""
        plan, chain = self._plan, 2 * self.num_stages
        return Counter(
            (
                tuple(plan.compute[batch * chain : (batch + 1) * chain]),
                bytes(plan.is_split[batch * self.num_stages : (batch + 1) * self.num_stages]),
            )
            for batch in range(self.num_batches)
        )

    @cached_property
    def _totals(self) -> tuple[list[int], list[int], list[int]]:
        """By worker, in ticks: its compute time, its first start and its last end."""
        busy, last = [0] * self.num_workers, [0] * self.num_workers
        first: dict[int, int] = {}
        for column in self._plan.columns(self._starts):
            worker = column.workers[0]
            # In a pipeline, a stage has one worker.
            if column.workers.count(worker) == len(column.workers):
                busy[worker] += sum(column.ends) - sum(column.starts)
                last[worker] = max(last[worker], *column.ends)
                first[worker] = min(first.get(worker, column.starts[0]), *column.starts)
                continue
            for worker, start, end in zip(column.workers, column.starts, column.ends, strict=True):
                busy[worker] += end - start
                if end > last[worker]:
                    last[worker] = end
                if start < first.get(worker, end):
                    first[worker] = start
        return busy, [first.get(worker, 0) for worker in range(self.num_workers)], last

    @property
    def full_title(self) -> str:
        """The title of pictures: with what makes the simulation differ from the default."""
        return ": ".join(filter(None, (self.title, ", ".join(self.details))))

    def timeline(self, until: Time = 0) -> Timeline:
        """The diagram: one row per worker with work, transfers and reductions; memory below.

        Its axis extends to `until`, for a comparison with longer ones. Raises SimulationError if
        there are too many cells to draw.
        """
        plan, costs = self._plan, self.costs
        check_drawing(len(self._starts) + len(self._extras))
        longest = float(max(self.makespan, until))
        unit, scale = time_scale(longest, costs.time_unit)

        def drawn(time: Time) -> float:
            return float(time) * scale

        rows = [f"rank {worker}" for worker in range(self.num_workers)]
        spans = []
        for worker, start, end, stage, batch, direction in self.cells:
            kind = "FBW"[direction]
            if kind == "B" and plan.is_split[batch * plan.num_stages + stage]:
                kind = "I"
            spans.append(Span(worker, drawn(start), drawn(end), kind, stage, batch))
        curves, curves_label = activation_curves(rows, spans), "stage inputs held, by rank"
        if costs.has_sizes:
            size_unit, of_one = size_scale(max(self.peak_memory), costs.size_unit)
            for worker, name in enumerate(rows):
                curve = self.memory.curve(worker)
                curves[name] = [(drawn(at), float(sum(sizes)) * of_one) for at, sizes in curve]
            curves_label = f"memory, by rank{size_unit and f', {size_unit}'}"
        spans += [
            Span(worker, drawn(self._time(start)), drawn(self._time(end)), kind)
            for worker, start, end, kind, _ in self._extras
        ]
        spans += [
            Span(worker, drawn(one.start), drawn(one.end), "REDUCE_GRAD", one.stage)
            for one in self.reductions
            for worker in one.workers
        ]
        return Timeline(
            self.full_title,
            rows,
            spans,
            unit=unit,
            caption=self.summary(),
            letters=LETTERS,
            curves=curves,
            curves_label=curves_label,
            until=longest * scale if until else 0,
            is_by_stage=self.is_by_stage,
        )

    def summary(self) -> str:
        """The main figures, in one line."""
        costs = self.costs
        peak = f"peak activations {max(self.peak_activations)}"
        if costs.has_sizes:
            peak = f"peak memory {show_size(max(self.peak_memory), costs.size_unit)}"
        return (
            f"{self.num_workers} ranks, {self.num_stages} stages, {self.num_batches} microbatches; "
            f"makespan {show_time(self.makespan, costs.time_unit)} "
            f"(lower bound {show_time(self.lower_bound, costs.time_unit)}), "
            f"bubble {float(self.bubble_fraction):.1%}, {peak}"
        )

    def __repr__(self) -> str:
        return f"<{self.title}: {self.summary()}>"

    def __str__(self) -> str:
        from titanlite.tools.figures.schedule_text import draw_text

        return draw_text(self.timeline())

    def _repr_html_(self) -> str:
        from titanlite.tools.figures.schedule_svg import draw_svg

        return draw_svg(self.timeline())


def _most_at_once(starts: list[int], ends: list[int]) -> int:
    """The most intervals open at once; an interval that ends when another starts is closed."""
    starts.sort()
    ends.sort()
    most = ended = 0
    for begun, start in enumerate(starts, 1):
        while ends[ended] <= start:
            ended += 1
        most = max(most, begun - ended)
    return most

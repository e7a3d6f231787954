"""Training schemes by name: the notebook's strategies, all pipeline schedules, or your own file.

The command line calls `run_scheme("1F1B", Workload(workers=4, batches=8))`. A scheme is a name
from `STRATEGIES` or `titanlite.schedule.SCHEDULES`, a schedule in a CSV file, or `file.py` with a
function `strategy(work)` (or `file.py:another_name`).
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Literal

from titanlite.schedule import SCHEDULES, Schedule, ScheduleError, make_schedule, read_csv
from titanlite.schedule import check as check_schedule
from titanlite.schedule.generators import schedule_name
from titanlite.tools.simulate.costs import Costs
from titanlite.tools.simulate.exact import exact, simplest
from titanlite.tools.simulate.experiment import JobSizes, open_experiment
from titanlite.tools.simulate.network import Link, Network
from titanlite.tools.simulate.placement import Needs, Strategy
from titanlite.tools.simulate.priority import PRIORITIES
from titanlite.tools.simulate.result import Simulation
from titanlite.tools.simulate.simulation import (
    MaxInFlight,
    Order,
    Priority,
    simulate,
    simulate_schedule,
)
from titanlite.tools.simulate.size import check_size
from titanlite.tools.simulate.work import ComputeAndWeightWorkers, Direction, SimulationError, Work

FREE = Network(Link())  # transfers take no time, but can be reductions


@dataclass(frozen=True)
class Workload:
    """The workload of a scheme. The default for `stages` is the fewest that the scheme allows.

    With `costs_per="stage"`, all schemes get the same model: if a scheme has several stages per
    worker by default, `costs` is divided among them. With "model", `costs` are of the whole model,
    so that any number of workers or stages trains the same one. `group_size` is the number of
    workers per group of a looped pipeline.
    """

    workers: int = 4
    batches: int = 8
    stages: int | None = None
    group_size: int | None = None
    priority: str | Priority | None = None
    max_in_flight: MaxInFlight | None = None
    split_backward: bool = False
    costs: Costs = field(default_factory=Costs)
    costs_per: Literal["stage", "model"] = "stage"

    @property
    def num_stages(self) -> int:
        """The number of stages of a strategy: as many as workers, unless given."""
        return self.workers if self.stages is None else self.stages


def run_scheme(scheme: str, workload: Workload) -> Simulation:
    """Simulate `scheme`. Raises SimulationError or ScheduleError if it cannot run."""
    if scheme.endswith(".csv"):
        schedule = read_csv(scheme)
        check_schedule(schedule)
        return _run_schedule(schedule, workload)
    path, _, function = scheme.partition(":")
    if path.endswith(".py"):
        sizes = JobSizes(workload.workers, workload.num_stages, workload.batches)
        with open_experiment(path, function or "strategy", sizes) as parts:
            return _run_parts(parts, workload, title=scheme)
    for name, make in STRATEGIES.items():
        if scheme.lower() in (name.lower(), make.__name__.lower()):
            simulation = _run_strategy(make(workload), workload, title=name)
            simulation.is_by_stage = True
            if workload.group_size is not None:
                simulation.details.insert(0, f"groups of {workload.group_size}")
            return simulation
    return _run_schedule(_make_schedule(scheme, workload), workload)


def distributed_data_parallelism(workload: Workload) -> Strategy:
    """DDP: every worker stores the whole model and runs whole batches."""
    workers = workload.workers
    return lambda work: ComputeAndWeightWorkers(work.batch % workers, work.batch % workers)


def fully_sharded_data_parallelism(workload: Workload) -> Strategy:
    """FSDP: like DDP, but each stage's weights are stored on one worker and fetched by all."""
    workers = workload.workers
    return lambda work: ComputeAndWeightWorkers(work.batch % workers, work.stage % workers)


def pipeline_parallelism(workload: Workload) -> Strategy:
    """A pipeline: one stage per worker; every batch passes through all workers."""
    workers = workload.workers
    return lambda work: ComputeAndWeightWorkers(work.stage % workers, work.stage % workers)


def cuckoo_parallelism(workload: Workload) -> Strategy:
    """A pipeline that runs the first batches' backwards on the idle workers at its other end."""
    stages = workload.num_stages

    def strategy(work: Work) -> ComputeAndWeightWorkers:
        early = work.stage < stages // 2 + 2 and work.batch < workload.batches // 2 - 2
        if work.direction == Direction.BACKWARD and early:
            return ComputeAndWeightWorkers(workload.workers - work.stage - 1, work.stage)
        return ComputeAndWeightWorkers(work.stage, work.stage)

    return strategy


def looped_pipeline_parallelism(workload: Workload) -> Strategy:
    """Each batch loops over a group of workers that is smaller than the number of stages."""
    group = _group_size(workload)

    def strategy(work: Work) -> ComputeAndWeightWorkers:
        worker = group * work.batch % workload.workers + work.stage % group
        return ComputeAndWeightWorkers(worker, worker)

    return strategy


def fully_sharded_looped_pipeline_parallelism(workload: Workload) -> Strategy:
    """The same, but each stage's weights are stored on one worker and fetched by other groups."""
    group = _group_size(workload)

    def worker(stage: int, index: int) -> int:
        return group * index % workload.workers + stage % group

    return lambda work: ComputeAndWeightWorkers(
        worker(work.stage, work.batch), worker(work.stage, work.stage)
    )


STRATEGIES: dict[str, Callable[[Workload], Strategy]] = {
    "DDP": distributed_data_parallelism,
    "FSDP": fully_sharded_data_parallelism,
    "Pipeline": pipeline_parallelism,
    "Cuckoo": cuckoo_parallelism,
    "LoopedPipeline": looped_pipeline_parallelism,
    "FSDPLoopedPipeline": fully_sharded_looped_pipeline_parallelism,
}
SCHEMES = (*STRATEGIES, *SCHEDULES)


def _group_size(workload: Workload) -> int:
    group = max(1, workload.workers // 2) if workload.group_size is None else workload.group_size
    if group < 1 or workload.workers % group:
        raise SimulationError(
            f"the group size {group} does not divide {workload.workers} workers; "
            "choose one that does"
        )
    return group


def _run_strategy(
    strategy: Strategy,
    workload: Workload,
    title: str,
    order: Order | None = None,
    needs: Needs | None = None,
) -> Simulation:
    stages = workload.num_stages
    priority = workload.priority
    if isinstance(priority, str):
        if priority not in PRIORITIES:
            raise SimulationError(
                f"there is no priority {priority!r}; choose from {', '.join(PRIORITIES)}"
            )
        priority = PRIORITIES[priority](stages, workload.batches)
    pieces = stages if workload.costs_per == "model" else 1
    return simulate(
        workload.workers,
        stages,
        workload.batches,
        strategy,
        priority,
        order=order,
        max_in_flight=workload.max_in_flight,
        split_backward=workload.split_backward,
        needs=needs,
        costs=_cut_finer(workload.costs, pieces),
        title=title,
    )


def _run_parts(parts: Mapping[str, Any], workload: Workload, title: str) -> Simulation:
    """Run what a strategy file defines. What the file and the workload both give is refused."""
    costs, network = workload.costs, parts.get("network")
    plain = replace(costs, network=None, reduce_gradients=False, time_unit="", size_unit="")
    changed = [f.name for f in fields(Costs) if getattr(plain, f.name) != f.default]
    ordered = {
        "priority": workload.priority is not None,
        "max_in_flight": workload.max_in_flight is not None,
        "split_backward": workload.split_backward,
    }
    twice = {
        "order": [name for name, is_given in ordered.items() if is_given],
        "priority": ["priority"] * ordered["priority"],
        "max_in_flight": ["max_in_flight"] * ordered["max_in_flight"],
        "costs": changed
        + ["reduce_gradients"] * costs.reduce_gradients
        + ["costs_per"] * (workload.costs_per != "stage"),
        "network": ["network"] * (costs.network not in (None, FREE)),
    }
    for name, options in twice.items():
        if name in parts and options:
            raise SimulationError(f"{title} defines {name}; leave out {', '.join(options)}")
    if "costs" in parts:
        own: Costs = parts["costs"]
        if own.network is not None and (network or costs.network) is not None:
            raise SimulationError(f"{title}: costs has a network; leave out the other one")
        costs = replace(own, network=network or costs.network or own.network)
    elif network is not None:
        costs = replace(costs, network=network)
    workload = replace(
        workload,
        costs=costs,
        priority=parts.get("priority", workload.priority),
        max_in_flight=parts.get("max_in_flight", workload.max_in_flight),
    )
    return _run_strategy(parts["strategy"], workload, title, parts.get("order"), parts.get("needs"))


def _run_schedule(schedule: Schedule, workload: Workload) -> Simulation:
    if workload.priority or workload.max_in_flight is not None or workload.split_backward:
        raise SimulationError(
            f"{schedule.name} has a fixed order; leave out priority, max_in_flight and "
            f"split_backward, which apply only to strategies ({', '.join(STRATEGIES)})"
        )
    if workload.costs_per == "model":
        pieces = schedule.num_stages
    else:
        pieces = 1 if workload.stages is not None else schedule.num_stages // schedule.num_ranks
    return simulate_schedule(schedule, _cut_finer(workload.costs, pieces))


def _make_schedule(scheme: str, workload: Workload) -> Schedule:
    try:
        name = schedule_name(scheme)
    except ScheduleError:
        known = {name.lower(): name for name in (*SCHEMES, "ladder")}
        near = difflib.get_close_matches(scheme.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(known[n] for n in near)}? " if near else ""
        raise SimulationError(
            f"there is no scheme {scheme!r}; {hint}choose from {', '.join(known.values())}, "
            "or give a .py or .csv file"
        ) from None
    workers, batches = workload.workers, workload.batches
    check_size(workers, workload.num_stages, batches, is_listed=True)
    if workload.stages is None:
        return make_schedule(name, workers, batches)
    if workload.stages % workers:
        raise SimulationError(
            f"{name} needs the same number of stages on every worker; {workload.stages} stages "
            f"do not divide evenly over {workers} workers"
        )
    return make_schedule(name, workers, batches, workload.stages // workers)


def _cut_finer(costs: Costs, pieces: int) -> Costs:
    """The costs of each stage after every stage is split into `pieces` equal stages."""
    if pieces == 1:
        return costs
    times, sizes = ("forward", "backward", "weight_gradient"), ("weight", "gradient", "optimizer")
    names = (*times, *(f"{name}_units" for name in (*sizes, "kept")))
    values = {name: getattr(costs, name) for name in names}
    if any(callable(value) or isinstance(value, Iterable) for value in values.values()):
        raise SimulationError(
            "costs that differ by stage need the number of stages; set stages (costs of the whole "
            "model are one value each)"
        )
    finer: dict[str, Any] = {
        name: simplest(Fraction(exact(value, f"costs: {name}")) / pieces)
        for name, value in values.items()
        if value is not None
    }
    return replace(costs, **finer)

"""Training schemes by name: the notebook's strategies, all pipeline schedules, or your own file.

The command line calls `run_scheme("1F1B", Workload(workers=4, batches=8))`. A scheme is a name
from `STRATEGIES` or `titanlite.schedule.SCHEDULES`, a schedule in a CSV file, or `file.py` with a
function `strategy(work)` (or `file.py:another_name`).
"""

from __future__ import annotations

import difflib
import runpy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from titanlite.schedule import SCHEDULES, Schedule, ScheduleError, make_schedule, read_csv
from titanlite.schedule import check as check_schedule
from titanlite.schedule.generators import schedule_name
from titanlite.simulate.costs import Costs
from titanlite.simulate.placement import Strategy
from titanlite.simulate.priority import PRIORITIES
from titanlite.simulate.result import Simulation
from titanlite.simulate.simulation import MaxInFlight, simulate, simulate_schedule
from titanlite.simulate.size import check_size
from titanlite.simulate.work import ComputeAndWeightWorkers, Direction, SimulationError, Work


@dataclass(frozen=True)
class Workload:
    """The workload of a scheme. The default for `stages` is the fewest that the scheme allows.

    All schemes get the same model: if a scheme has several stages per worker by default, `costs`
    is divided among them. `group_size` is the number of workers per group of a looped pipeline.
    """

    workers: int = 4
    batches: int = 8
    stages: int | None = None
    group_size: int | None = None
    priority: str | None = None
    max_in_flight: MaxInFlight | None = None
    split_backward: bool = False
    costs: Costs = field(default_factory=Costs)


def run_scheme(scheme: str, workload: Workload) -> Simulation:
    """Simulate `scheme`. Raises SimulationError or ScheduleError if it cannot run."""
    if scheme.endswith(".csv"):
        schedule = read_csv(scheme)
        check_schedule(schedule)
        return _run_schedule(schedule, workload)
    path, _, function = scheme.partition(":")
    if path.endswith(".py"):
        return _run_strategy(_load_strategy(path, function or "strategy"), workload, title=scheme)
    for name, make in STRATEGIES.items():
        if scheme.lower() in (name.lower(), make.__name__.lower()):
            return _run_strategy(make(workload), workload, title=name)
    return _run_schedule(_make_schedule(scheme, workload), workload)


def distributed_data_parallelism(workload: Workload) -> Strategy:
    """DDP: every worker stores the whole model and runs whole batches."""
    return lambda work: ComputeAndWeightWorkers(
        work.batch % workload.workers, work.batch % workload.workers
    )


def fully_sharded_data_parallelism(workload: Workload) -> Strategy:
    """FSDP: like DDP, but each stage's weights are stored on one worker and fetched by all."""
    return lambda work: ComputeAndWeightWorkers(
        work.batch % workload.workers, work.stage % workload.workers
    )


def pipeline_parallelism(workload: Workload) -> Strategy:
    """A pipeline: one stage per worker; every batch passes through all workers."""
    return lambda work: ComputeAndWeightWorkers(
        work.stage % workload.workers, work.stage % workload.workers
    )


def cuckoo_parallelism(workload: Workload) -> Strategy:
    """A pipeline that runs the first batches' backwards on the idle workers at its other end."""
    stages = workload.stages or workload.workers

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


def _group_size(workload: Workload) -> int:
    group = max(1, workload.workers // 2) if workload.group_size is None else workload.group_size
    if group < 1 or workload.workers % group:
        raise SimulationError(
            f"the group size {group} does not divide {workload.workers} workers; "
            "choose one that does"
        )
    return group


def _run_strategy(strategy: Strategy, workload: Workload, title: str) -> Simulation:
    stages = workload.workers if workload.stages is None else workload.stages
    priority = None
    if workload.priority is not None:
        if workload.priority not in PRIORITIES:
            raise SimulationError(
                f"there is no priority {workload.priority!r}; choose from {', '.join(PRIORITIES)}"
            )
        priority = PRIORITIES[workload.priority](stages, workload.batches)
    return simulate(
        workload.workers,
        stages,
        workload.batches,
        strategy,
        priority,
        max_in_flight=workload.max_in_flight,
        split_backward=workload.split_backward,
        costs=workload.costs,
        title=title,
    )


def _run_schedule(schedule: Schedule, workload: Workload) -> Simulation:
    if workload.priority or workload.max_in_flight is not None or workload.split_backward:
        raise SimulationError(
            f"{schedule.name} has a fixed order; leave out priority, max_in_flight and "
            f"split_backward, which apply only to strategies ({', '.join(STRATEGIES)})"
        )
    chunks = schedule.num_stages // schedule.num_ranks
    costs = workload.costs if workload.stages is not None else _cut_finer(workload.costs, chunks)
    return simulate_schedule(schedule, costs)


def _make_schedule(scheme: str, workload: Workload) -> Schedule:
    try:
        name = schedule_name(scheme)
    except ScheduleError:
        known = {name.lower(): name for name in (*STRATEGIES, *SCHEDULES)}
        near = difflib.get_close_matches(scheme.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(known[n] for n in near)}? " if near else ""
        raise SimulationError(
            f"there is no scheme {scheme!r}; {hint}choose from {', '.join(known.values())}, "
            "or give a .py or .csv file"
        ) from None
    stages = workload.workers if workload.stages is None else workload.stages
    check_size(workload.workers, stages, workload.batches, is_listed=True)
    if workload.stages is None:
        return make_schedule(name, workload.workers, workload.batches)
    if workload.stages % workload.workers:
        raise SimulationError(
            f"{name} needs the same number of stages on every worker; {workload.stages} stages "
            f"do not divide evenly over {workload.workers} workers"
        )
    return make_schedule(
        name, workload.workers, workload.batches, workload.stages // workload.workers
    )


def _cut_finer(costs: Costs, pieces: int) -> Costs:
    """The costs of each stage after every stage is split into `pieces` equal stages."""
    if pieces == 1:
        return costs
    names = ("forward", "backward", "weight_gradient", "weight_units")
    values = {name: getattr(costs, name) for name in names}
    if not all(value is None or isinstance(value, int | float) for value in values.values()):
        raise SimulationError("costs that differ by stage need the number of stages; set stages")
    finer = {name: value and value / pieces for name, value in values.items()}
    return replace(costs, **finer)


def _load_strategy(path: str, function: str) -> Strategy:
    if not Path(path).is_file():
        raise SimulationError(f"{path}: there is no such file")
    try:
        names = runpy.run_path(path)
    except Exception as error:
        raise SimulationError(f"{path}: raises {type(error).__name__}: {error}") from error
    strategy = names.get(function)
    if not callable(strategy):
        raise SimulationError(
            f"{path}: there is no function {function!r}; define {function}(work) -> "
            "ComputeAndWeightWorkers, or name another function as file.py:name"
        )
    return strategy

"""`simulate`: run any training strategy, given as a placement and an order, in virtual time.

A strategy maps each work item to the worker that computes it and the worker that stores its
weights. A priority, a limit on work in flight, or a fixed order decides what runs first. Data
parallelism, FSDP, pipelines, looped pipelines and new schemes differ only in these.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, TypeAlias, cast

from titanlite.schedule.actions import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action, Schedule
from titanlite.tools.simulate import placement
from titanlite.tools.simulate.costs import Costs
from titanlite.tools.simulate.details import details
from titanlite.tools.simulate.engine import run
from titanlite.tools.simulate.plan import Plan
from titanlite.tools.simulate.priority import Lexicographic, OldestBatchFirst
from titanlite.tools.simulate.reduction import reduce_gradients
from titanlite.tools.simulate.result import Simulation
from titanlite.tools.simulate.size import check_size
from titanlite.tools.simulate.work import (
    ComputeAndWeightWorkers,
    Direction,
    SimulationError,
    Work,
    ask,
    one_line,
)

Priority: TypeAlias = Callable[[Work], Any]
Order: TypeAlias = Callable[[int], "Iterable[Work | Action]"]
MaxInFlight: TypeAlias = int | Sequence[int] | Callable[[int], int]


def simulate(
    num_workers: int,
    num_stages: int,
    num_batches: int,
    strategy: placement.Strategy,
    priority_order: Priority | None = None,
    *,
    order: Order | None = None,
    max_in_flight: MaxInFlight | None = None,
    split_backward: bool = False,
    needs: placement.Needs | None = None,
    costs: Costs | None = None,
    title: str | None = None,
) -> Simulation:
    """Run the forward and backward of `num_batches` batches, each work item as early as possible.

    `strategy(work)` returns ComputeAndWeightWorkers. Of all work items whose predecessor has ended,
    the one that can start earliest runs first. Ties go to the smallest key of `priority_order`
    (default `OldestBatchFirst`), which is called with the frontier: the predecessor that has just
    ended. A batch that has not started has no frontier; your own priority is then called with its
    first work item, which wins a tie between equal keys.

    `max_in_flight` limits, per worker, the batches whose forward it has started and whose backward
    has not ended. `split_backward` runs weight gradients separately, when nothing else can run.
    `order(worker)` replaces these three: it lists the work items of that worker, as Work or as
    schedule `Action`, in execution order. A backward is split if its weight gradient is listed.

    `needs(work)` lists further work items whose output `work` needs, besides that of its
    predecessor: it starts once they have ended and their messages have arrived. An output is sent
    once to each worker that needs it. Context and expert parallelism are strategies with needs.

    Raises SimulationError for counts below one, for a size that would take over ten minutes or
    more memory than there is, for an invalid result of a strategy, order or priority, and for an
    order or limit that deadlocks.
    After "Unifying Distributed Training Strategies Under one Scheme" (parallelsim notebook).
    """
    num_workers = _count("num_workers", num_workers)
    num_stages = _count("num_stages", num_stages)
    num_batches = _count("num_batches", num_batches)
    if costs is not None and not isinstance(costs, Costs):
        raise SimulationError(f"costs is {costs!r}; it must be a Costs")
    if order is not None and (priority_order or max_in_flight is not None or split_backward):
        raise SimulationError(
            "order fixes the whole schedule; leave out priority_order, max_in_flight and "
            "split_backward"
        )
    check_size(num_workers, num_stages, num_batches, is_listed=order is not None)
    title = title or str(getattr(strategy, "__name__", type(strategy).__name__))
    compute, weight = placement.place(num_workers, num_stages, num_batches, strategy, title)
    plan = Plan(
        num_workers,
        num_stages,
        num_batches,
        compute,
        weight,
        costs or Costs(),
        bytearray([split_backward]) * (num_stages * num_batches),
    )
    if needs is not None:
        plan.needs = placement.read_needs(plan, needs)
    if order is not None:
        plan.orders = _read_orders(plan, order)
    else:
        plan.keys = _keys(plan, priority_order)
        plan.max_in_flight = _read_caps(num_workers, max_in_flight)
    may_be_stuck, extras = run(plan)
    _check_all_ran(plan, may_be_stuck)
    starts = cast("list[int]", may_be_stuck)  # None only where there is no separate weight gradient
    reductions = reduce_gradients(plan, starts) if plan.costs.reduce_gradients else []
    return Simulation(
        plan, starts, extras, reductions, title, details(plan, priority_order, order, needs)
    )


def simulate_schedule(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Simulate a pipeline schedule: its placement is the strategy, its actions are the order.

    An overlapped forward and backward run one after the other, as in PyTorch's runtime.
    """
    workers = [ComputeAndWeightWorkers(rank, rank) for rank in schedule.stage_to_rank]

    def strategy(work: Work) -> ComputeAndWeightWorkers:
        return workers[work.stage]

    return simulate(
        schedule.num_ranks,
        schedule.num_stages,
        schedule.num_microbatches,
        strategy,
        order=schedule.compute,
        costs=costs,
        title=schedule.name,
    )


def _count(name: str, count: Any) -> int:
    """A count as a Python integer."""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise SimulationError(f"{name} is {count!r}; it must be an integer of at least 1")
    return int(count)


def _check_all_ran(plan: Plan, starts: list[int | None]) -> None:
    if None not in starts[: plan.num_chained]:
        return
    blocked: dict[int, int] = {}
    if plan.orders is not None:
        for worker, numbers in enumerate(plan.orders):
            stuck = next((number for number in numbers if starts[number] is None), None)
            if stuck is not None:
                blocked[worker] = stuck
        why = "the order deadlocks"
    else:
        for number in range(plan.num_chained):
            if starts[number] is None:
                blocked.setdefault(plan.worker(number), number)
        why = "max_in_flight is too low for this strategy, which deadlocks"
    if plan.needs:
        is_free = plan.orders is None and plan.max_in_flight is None
        why = "the needs go in a circle" if is_free else f"{why}, or its needs go in a circle"
    listed = "; ".join(
        f"worker {worker} is blocked at {plan.work(number)}"
        for worker, number in sorted(blocked.items())
    )
    raise SimulationError(f"{why}: {listed}")


def _keys(plan: Plan, priority: Priority | None) -> Sequence[int]:
    """The key of every work item but weight gradients: the rank of the priority of its frontier."""
    stages, chain, modulus = plan.num_stages, 2 * plan.num_stages, plan.modulus
    way = placement.way_of_a_batch(stages)
    if priority is None:
        priority = OldestBatchFirst(stages, plan.num_batches)
    if isinstance(priority, Lexicographic):
        if (priority.stages, priority.batches) != (stages + 1, plan.num_batches):
            raise SimulationError(
                f"the priority is made for {priority.stages - 1} stages and {priority.batches} "
                f"batches; make it for {stages} and {plan.num_batches}"
            )
        frontiers = [(-1, Direction.FORWARD), *way[:-1]]
        base = [priority.key_at_batch_zero(*frontier) for frontier in frontiers]
        first = [key * modulus + k for k, key in enumerate(base)]
        step = priority.per_batch * modulus + chain
        in_batch = ([key + step * batch for key in first] for batch in range(plan.num_batches))
        packed = array("q")
        try:
            for keys_of_batch in in_batch:
                packed.fromlist(keys_of_batch)
        except OverflowError:
            return [key + step * batch for batch in range(plan.num_batches) for key in first]
        return packed
    frontier_of = [Work(way[max(k - 1, 0)][0], 0, way[max(k - 1, 0)][1]) for k in range(chain)]
    priorities = []
    for batch in range(plan.num_batches):
        for k, frontier in enumerate(frontier_of):
            priorities.append((_ask(priority, frontier._replace(batch=batch)), k > 0))
    for number in range(0, len(priorities), max(1, len(priorities) // placement.ASKED_TWICE)):
        frontier = frontier_of[number % chain]._replace(batch=number // chain)
        if repr(_ask(priority, frontier)) != repr(priorities[number][0]):
            raise SimulationError(
                f"the priority changes its answer when it is called again for {frontier}; it must "
                "return the same key for the same work item"
            )
    try:
        in_order = sorted(range(len(priorities)), key=priorities.__getitem__)
    except Exception as error:
        raise SimulationError(
            f"the keys of the priority cannot be compared: {one_line(error)}"
        ) from error
    keys = [0] * len(priorities)
    for rank, number in enumerate(in_order):
        keys[number] = rank * modulus + number
    return keys


def _ask(priority: Priority, frontier: Work) -> Any:
    key = ask("the priority", priority, frontier)
    if isinstance(key, float) and math.isnan(key):
        raise SimulationError(f"the priority is nan for {frontier}, which cannot be compared")
    return key


def _read_caps(num_workers: int, cap: MaxInFlight | None) -> list[int] | None:
    if cap is None:
        return None
    if callable(cap):
        try:
            caps, again = ([cap(worker) for worker in range(num_workers)] for _ in range(2))
        except Exception as error:
            raise SimulationError(
                f"max_in_flight raises {type(error).__name__}: {one_line(error)}"
            ) from error
        if caps != again:
            raise SimulationError("max_in_flight changes its answer when it is called again")
    elif isinstance(cap, Iterable) and not isinstance(cap, str):
        caps = list(cap)
    else:
        caps = [cap] * num_workers
    if len(caps) != num_workers:
        raise SimulationError(
            f"max_in_flight has {len(caps)} values for {num_workers} workers; give one value, or "
            "one per worker"
        )
    for worker, value in enumerate(caps):
        is_count = isinstance(value, Integral) and not isinstance(value, bool)
        if not (is_count or value == math.inf) or value < 1:
            raise SimulationError(
                f"max_in_flight of worker {worker} is {value!r}; it must be an integer of at "
                "least 1"
            )
    return caps


def _read_orders(plan: Plan, order: Order) -> list[list[int]]:
    """The orders as lists of numbers; sets `plan.is_split` for the backwards that they split."""
    orders: list[list[int]] = []
    seen = bytearray(plan.num_chained + len(plan.is_split))

    def listing(worker: int) -> list[Work | Action]:
        return list(order(worker))

    for worker in range(plan.num_workers):
        listed = ask("the order", listing, worker, f"worker {worker}")
        if worker == 0 and listed != ask("the order", listing, worker, "worker 0"):
            raise SimulationError(
                "the order changes its answer when it is called again for worker 0"
            )
        numbers = _quick_numbers(plan, listed, worker, seen)
        if numbers is None:
            numbers = [_listed_number(plan, item, worker, seen) for item in listed]
        orders.append(numbers)
    missing = seen.find(0, 0, plan.num_chained)
    if missing >= 0:
        raise SimulationError(
            f"the order leaves out {plan.work(missing)}, which the strategy puts on worker "
            f"{plan.worker(missing)}"
        )
    return orders


def _quick_numbers(plan: Plan, listed: list[Any], worker: int, seen: bytearray) -> list[int] | None:
    """The numbers of an order of Actions, of which there can be millions; None if one is wrong."""
    if {Action} != set(map(type, listed)):
        return None
    # number = first + step * stage + each * microbatch, by kind
    last = 2 * plan.num_stages - 1
    kinds = {FORWARD: (0, 1), FULL_BACKWARD: (last, -1)}
    stages, batches, compute = range(plan.num_stages), range(plan.num_batches), plan.compute
    numbers = []
    for stage, kind, microbatch, _ in listed:
        if kind not in kinds or stage not in stages or microbatch not in batches:
            return None
        first, step = kinds[kind]
        numbers.append(first + step * stage + (last + 1) * microbatch)
    if {worker} != {compute[number] for number in numbers} or len(set(numbers)) < len(numbers):
        return None
    for number in numbers:
        seen[number] = 1
    return numbers


def _listed_number(plan: Plan, item: Any, worker: int, seen: bytearray) -> int:
    """The number of a listed item, which is then seen."""
    if isinstance(item, Action):
        directions = {FORWARD: Direction.FORWARD, BACKWARD_WEIGHT: Direction.WEIGHT}
        direction = directions.get(item.kind, Direction.BACKWARD)
        item = Work(item.stage, item.microbatch, direction)  # type: ignore[arg-type]
    number = plan.read(item, f"the order of worker {worker} lists")
    work = plan.work(number)
    if plan.worker(number) != worker:
        raise SimulationError(
            f"the order puts {work} on worker {worker}, but the strategy puts it on worker "
            f"{plan.worker(number)}"
        )
    if seen[number]:
        raise SimulationError(f"the order of worker {worker} lists {work} twice")
    seen[number] = 1
    if work.direction == Direction.WEIGHT:
        plan.is_split[number - plan.num_chained] = 1
    return number

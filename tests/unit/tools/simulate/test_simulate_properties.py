"""For any strategy and costs, the engine follows the greedy rule; its results are consistent."""

from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.tools.simulate import (
    BackwardFirst,
    ComputeAndWeightWorkers,
    Costs,
    Direction,
    Link,
    Network,
    OldestBatchFirst,
    OldestStageFirst,
    Work,
    simulate,
)

PRIORITIES = [OldestBatchFirst, OldestStageFirst, BackwardFirst]
quick = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def problems(draw):
    workers, stages, batches = (draw(st.integers(1, most)) for most in (4, 5, 6))
    numbers = st.integers(0, workers - 1)
    table = {
        (stage, batch, direction): (draw(numbers), draw(numbers))
        for stage in range(stages)
        for batch in range(batches)
        for direction in (Direction.FORWARD, Direction.BACKWARD)
    }
    durations = st.lists(st.integers(1, 4), min_size=stages, max_size=stages)
    costs = {"forward": draw(durations), "backward": draw(durations)}
    return workers, stages, batches, table, draw(st.sampled_from(PRIORITIES)), costs


def strategy_of(table):
    return lambda work: ComputeAndWeightWorkers(*table[tuple(work)])


def greedy(workers, stages, batches, table, priority, costs):
    """The greedy rule, written directly: scan the frontier for the earliest possible start."""
    free = [0] * workers
    frontier = {batch: (Work(-1, batch, Direction.FORWARD), 0) for batch in range(batches)}
    cells = []
    while frontier:
        best = None
        for work, ended in frontier.values():
            stage, batch, direction = work
            if direction == Direction.FORWARD and stage < stages - 1:
                successor = Work(stage + 1, batch, direction)
            elif direction == Direction.FORWARD:
                successor = Work(stage, batch, Direction.BACKWARD)
            else:
                successor = Work(stage - 1, batch, direction)
            start = max(free[table[tuple(successor)][0]], ended)
            key = (start, priority(work))
            if best is None or key < best[0]:
                best = key, successor
        (start, _), work = best
        worker = table[tuple(work)][0]
        length = costs["forward" if work.direction == Direction.FORWARD else "backward"][work.stage]
        free[worker] = end = start + length
        cells.append((worker, start, end, *work))
        if work.direction == Direction.BACKWARD and work.stage == 0:
            del frontier[work.batch]
        else:
            frontier[work.batch] = work, end
    return sorted(cells)


@given(problems())
@quick
def test_engine_is_the_greedy_rule(problem):
    workers, stages, batches, table, make_priority, costs = problem
    priority = make_priority(stages, batches)
    simulation = simulate(
        workers, stages, batches, strategy_of(table), priority, costs=Costs(**costs)
    )
    expected = greedy(workers, stages, batches, table, priority, costs)
    assert [tuple(cell) for cell in simulation.cells] == expected


@given(
    problems(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 2),
    st.booleans(),
)
@quick
def test_results_are_consistent(problem, split, overlap, prefetch, latency, units, capped):
    workers, stages, batches, table, make_priority, costs = problem
    network = Network(Link(latency, 1), Link(0, Fraction(1, 2)), workers_per_node=2)
    simulation = simulate(
        workers,
        stages,
        batches,
        strategy_of(table),
        make_priority(stages, batches),
        split_backward=split,
        max_in_flight=stages * batches if capped else None,
        costs=Costs(
            **costs,
            weight_gradient=[Fraction(b, 4) for b in costs["backward"]],
            activation_units=units,
            weight_units=units,
            network=network,
            overlap_transfers=overlap,
            prefetch=prefetch,
            reduce_gradients=True,
        ),
    )
    cells = simulation.cells
    works = [tuple(cell[3:]) for cell in cells]
    assert len(works) == len(set(works)) == stages * batches * (3 if split else 2)

    total = batches * (sum(costs["forward"]) + sum(costs["backward"]))
    assert sum(cell.end - cell.start for cell in cells) == sum(simulation.busy) == total

    at = dict(zip(works, cells, strict=True))
    for earlier, later in pairwise(cells):
        assert earlier.worker != later.worker or earlier.end <= later.start
    for (stage, batch, direction), cell in at.items():
        if direction == Direction.WEIGHT:
            before = at[stage, batch, Direction.BACKWARD]
        elif direction == Direction.BACKWARD:
            last = stage == stages - 1
            before = at[
                stage if last else stage + 1, batch, Direction.FORWARD if last else direction
            ]
        elif stage:
            before = at[stage - 1, batch, direction]
        else:
            continue
        gap = 0
        if before.worker != cell.worker:
            gap = network.link(before.worker, cell.worker).seconds(units)
        assert cell.start >= before.end + gap

    assert simulation.makespan >= simulation.lower_bound
    assert simulation.makespan >= max(cell.end for cell in cells)
    assert 0 <= simulation.bubble_fraction < 1
    moves = [span for span in simulation.timeline().spans if span.kind == "SEND"]
    for send in moves:
        for cell in cells:
            overlaps = cell.start < send.end and send.start < cell.end
            assert cell.worker != send.row or not overlaps


@given(problems())
@quick
def test_peaks_and_transmissions_by_their_definition(problem):
    workers, stages, batches, table, make_priority, costs = problem
    simulation = simulate(
        workers, stages, batches, strategy_of(table), make_priority(stages, batches),
        costs=Costs(**costs),
    )  # fmt: skip
    at = {tuple(cell[3:]): cell for cell in simulation.cells}
    held = [[] for _ in range(workers)]
    for (stage, batch, direction), cell in at.items():
        if direction == Direction.BACKWARD:
            held[cell.worker].append((at[stage, batch, Direction.FORWARD].start, cell.end))
    peaks = [
        max((sum(a <= time < b for a, b in spans) for time, _ in spans), default=0)
        for spans in held
    ]
    assert simulation.peak_activations == peaks
    curves = simulation.timeline().curves.values()
    assert [max(value for _, value in curve) for curve in curves] == peaks

    sent = [0] * workers
    for batch in range(batches):
        way = [(stage, batch, Direction.FORWARD) for stage in range(stages)]
        way += [(stage, batch, Direction.BACKWARD) for stage in reversed(range(stages))]
        placed = [table[work][0] for work in way]
        for k, worker in enumerate(placed):
            sent[worker] += k > 0 and placed[k - 1] != worker
            sent[worker] += k < stages and placed[2 * stages - 1 - k] != worker
            sent[worker] += k == 0 and len(set(placed)) > 1
    assert simulation.activation_transmissions == sent


# ---- the unit of time ------------------------------------------------------------------------


def parts(divisor):
    return lambda value: Fraction(value) / divisor


def power(exponent):
    """The float that is written with this exponent: 3 and -1 make 0.3."""
    return lambda value: float(Fraction(value) * Fraction(10) ** exponent)


UNITS = {
    **{f"Fractions of 1/{n}": (parts(n), Fraction(1, n)) for n in (3, 7, 10)},
    **{f"floats of 1e{n}": (power(n), Fraction(10) ** n) for n in (-9, -3, -1, 2)},
    "Decimals of 0.01": (lambda v: Decimal(int(v)) / 100, Fraction(1, 100)),
}


@given(
    problems(),
    st.sampled_from(list(UNITS)),
    st.tuples(*[st.integers(0, 3)] * 4),
    st.tuples(*[st.booleans()] * 3),
    st.integers(0, 2),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_unit_of_time_changes_no_cell(problem, unit, times, flags, prefetch):
    workers, stages, batches, table, make_priority, durations = problem
    in_unit, scale = UNITS[unit]
    overlap, split, capped = flags

    def run(convert):
        between, inside = (Link(*map(convert, pair)) for pair in (times[:2], times[2:]))
        return simulate(
            workers,
            stages,
            batches,
            strategy_of(table),
            make_priority(stages, batches),
            split_backward=split,
            max_in_flight=stages * batches if capped else None,
            costs=Costs(
                **{name: list(map(convert, values)) for name, values in durations.items()},
                activation_units=2,
                weight_units=1,
                network=Network(between, inside, workers_per_node=2),
                overlap_transfers=overlap,
                prefetch=prefetch,
                reduce_gradients=True,
            ),
        )

    # Integers given as Fractions have Fractions as results: no time is rounded.
    one, other = run(Fraction), run(in_unit)

    def scaled(time):
        time = Fraction(time) * scale
        return time if "floats" not in unit else float(time)

    assert [
        cell._replace(start=scaled(cell.start), end=scaled(cell.end)) for cell in one.cells
    ] == other.cells
    assert [
        (r.stage, r.workers, scaled(r.start), scaled(r.end)) for r in one.reductions
    ] == other.reductions
    assert other.makespan == scaled(one.makespan)
    assert other.lower_bound == scaled(one.lower_bound)
    assert other.busy == list(map(scaled, one.busy))
    assert other.bubble_fraction == one.bubble_fraction
    assert other.peak_activations == one.peak_activations

"""Features that the notebook's simulator does not have (costs, orders, limits), and bad input."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from titanlite.schedule import SCHEDULES, Action, make_schedule
from titanlite.simulate import (
    BackwardFirst,
    ComputeAndWeightWorkers,
    Costs,
    Direction,
    Link,
    Network,
    OldestBatchFirst,
    OldestStageFirst,
    SimulationError,
    Work,
    simulate,
    simulate_schedule,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "pipeline_bubbles.json").read_text())
F, B, W = Direction.FORWARD, Direction.BACKWARD, Direction.WEIGHT


def pipeline(work):
    return ComputeAndWeightWorkers(work.stage, work.stage)


def data_parallel(work):
    return ComputeAndWeightWorkers(work.batch, work.batch)


def fully_sharded(work):
    return ComputeAndWeightWorkers(work.batch, work.stage)


def times(simulation, worker):
    return [
        (str(Work(*cell[3:])), cell.start, cell.end)
        for cell in simulation.cells
        if cell.worker == worker
    ]


# ---- schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN["formulas"])
def test_bubble_and_peak_formulas(name):
    formula = GOLDEN["formulas"][name]
    checked = 0
    for p in (1, 2, 3, 4, 6):
        for m in (1, 2, 3, 4, 5, 8, 11, 12, 24):
            for f, b, w in ((1, 1, 1), (3, 2, 2), (5, 7, 4), (4, 4, 1)):
                for v in (1,) if SCHEDULES[name].max_chunks == 1 else (2, 3):
                    if SCHEDULES[name].in_rounds and m % max(1, m // p):
                        continue
                    sizes = {"p": p, "m": m, "v": v, "F": f, "B": b, "W": w}
                    costs = Costs(forward=f, backward=b + w, weight_gradient=w)
                    simulation = simulate_schedule(make_schedule(name, p, m, v), costs)
                    if eval(formula["where"], sizes):
                        took = simulation.makespan
                        if name == "ZB-H2":
                            took = simulation.longest_span
                        assert took - m * v * (f + b + w) == eval(formula["extra"], sizes), sizes
                        checked += 1
                    if "peak" in formula:
                        peaks = [eval(formula["peak"], {**sizes, "r": r}) for r in range(p)]
                        assert simulation.peak_activations == peaks, sizes
    assert checked > 50


@pytest.mark.parametrize("row", GOLDEN["published"]["rows"], ids=lambda row: f"{row[0]}-{row[2]}")
def test_published_bubble_rates_to_four_decimals(row):
    profile = dict(zip(GOLDEN["published"]["columns"], row, strict=True))
    costs = Costs(
        forward=profile["F"],
        backward=profile["B"] + profile["W"],
        weight_gradient=profile["W"],
        network=Network(Link(profile["comm"])),
    )
    for name in ("1F1B", "ZB-H1", "ZB-H2"):
        schedule = make_schedule(name, profile["p"], profile["m"])
        rate = simulate_schedule(schedule, costs).span_bubble_fraction
        assert round(rate, 4) == profile[name], name


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 20)])
def test_zbv_has_no_bubble_on_any_rank_if_all_passes_take_the_same(ranks, microbatches):
    simulation = simulate_schedule(make_schedule("ZBV", ranks, microbatches))
    assert simulation.longest_span == 2 * microbatches * 3
    assert max(simulation.peak_activations) == 2 * ranks
    uneven = simulate_schedule(
        make_schedule("ZBV", ranks, microbatches), Costs(forward=2, backward=5, weight_gradient=2)
    )
    assert uneven.longest_span > 2 * microbatches * 7


def test_dual_pipe_v_beats_1f1b_of_the_same_model():
    dual = simulate_schedule(make_schedule("DualPipeV", 4, 10))
    plain = simulate_schedule(make_schedule("1F1B", 4, 10), Costs(forward=2, backward=4))
    assert dual.makespan < plain.makespan
    assert dual.peak_activations == [9, 9, 9, 9]


def test_a_schedule_and_its_order_by_hand_are_the_same():
    schedule = make_schedule("ZB-H1", 3, 5)
    by_hand = simulate(3, 3, 5, pipeline, order=lambda worker: schedule.actions[worker])
    assert by_hand.cells == simulate_schedule(schedule).cells


def test_an_order_of_works():
    def order(worker):
        return [Work(worker, b, d) for b in (1, 0) for d in (F, B)]

    simulation = simulate(2, 2, 2, pipeline, order=order)
    assert [c[3:] for c in simulation.cells if c.worker == 1] == [
        (1, 1, F),
        (1, 1, B),
        (1, 0, F),
        (1, 0, B),
    ]
    assert simulation.makespan == 12


# ---- priorities and caps ---------------------------------------------------------------------


@pytest.mark.parametrize("built_in", [OldestBatchFirst, OldestStageFirst, BackwardFirst])
def test_own_priority_equals_the_built_in_one(built_in):
    def looped(work):
        worker = 3 * work.batch % 6 + work.stage % 3
        return ComputeAndWeightWorkers(worker, worker)

    own = {
        OldestBatchFirst: lambda w: (w.batch, w.direction, w.stage),
        OldestStageFirst: lambda w: (w.stage, w.direction, w.batch),
        BackwardFirst: lambda w: (-w.direction, w.batch, w.stage),
    }[built_in]
    asked = []

    def priority(work):
        asked.append(work)
        return own(work)

    expected = simulate(6, 6, 12, looped, built_in(6, 12))
    if built_in is not BackwardFirst:
        assert simulate(6, 6, 12, looped, priority).cells == expected.cells
    else:
        assert simulate(6, 6, 12, looped, priority).makespan == expected.makespan
    assert min(work.stage for work in asked) == 0


def test_stage_minus_one_is_never_asked_about():
    stages = []
    simulate(2, 3, 4, lambda w: stages.append(w.stage) or (w.batch % 2, w.stage % 2))
    assert sorted(set(stages)) == [0, 1, 2]


@pytest.mark.parametrize("cap", [1, 2, 4, [4, 3, 2, 1]])
def test_no_worker_has_more_in_flight_than_its_cap(cap):
    simulation = simulate(4, 4, 9, pipeline, BackwardFirst(4, 9), max_in_flight=cap)
    caps = cap if isinstance(cap, list) else [cap] * 4
    assert all(p <= c for p, c in zip(simulation.peak_activations, caps, strict=True))


def test_split_backward_fills_bubbles_with_weight_gradients():
    kwargs = {"max_in_flight": lambda worker: 4 - worker}
    whole = simulate(4, 4, 8, pipeline, BackwardFirst(4, 8), **kwargs)
    split = simulate(4, 4, 8, pipeline, BackwardFirst(4, 8), split_backward=True, **kwargs)
    assert split.makespan < whole.makespan
    assert split.busy == whole.busy
    assert split.peak_activations == [4, 3, 2, 1]
    assert sum(cell.direction == W for cell in split.cells) == 32


# ---- costs -----------------------------------------------------------------------------------


def test_durations_by_stage_and_direction():
    costs = Costs(forward=[1, 3], backward=lambda stage: 5 - stage)
    simulation = simulate(2, 2, 1, pipeline, costs=costs)
    assert times(simulation, 0) == [("f0.0", 0, 1), ("b0.0", 8, 13)]
    assert times(simulation, 1) == [("f1.0", 1, 4), ("b1.0", 4, 8)]


def test_fractions_stay_exact():
    costs = Costs(forward=Fraction(1, 3), backward=Fraction(2, 3))
    assert simulate(3, 3, 7, pipeline, costs=costs).makespan == 7 + 2


def test_messages_delay_their_receiver():
    network = Network(Link(0.5, 0.25))
    costs = Costs(activation_units=2, network=network)
    simulation = simulate(2, 2, 1, pipeline, costs=costs)
    assert times(simulation, 1) == [("f1.0", 2, 3), ("b1.0", 3, 5)]
    assert times(simulation, 0) == [("f0.0", 0, 1), ("b0.0", 6, 8)]


def test_messages_of_one_sender_share_its_link():
    """Three forwards end after 1, 2, 3, but sending each message takes 4."""
    costs = Costs(activation_units=1, network=Network(Link(0, 4)))
    simulation = simulate(2, 2, 3, pipeline, OldestStageFirst(2, 3), costs=costs)
    starts = [cell.start for cell in simulation.cells if cell.worker == 1 and cell.direction == F]
    assert starts[:3] == [5, 9, 13]


def test_a_sender_that_cannot_overlap_is_busy():
    costs = Costs(activation_units=1, network=Network(Link(0, 4)), overlap_transfers=False)
    simulation = simulate(2, 2, 2, pipeline, OldestStageFirst(2, 2), costs=costs)
    assert times(simulation, 0)[:2] == [("f0.0", 0, 1), ("f0.1", 5, 6)]
    sends = [span for span in simulation.timeline().spans if span.kind == "SEND"]
    assert (sends[0].row, sends[0].start, sends[0].end) == (0, 1, 5)


def test_links_inside_a_node_are_others():
    network = Network(between=Link(7), inside=Link(1), workers_per_node=2)
    simulation = simulate(4, 4, 1, pipeline, costs=Costs(network=network))
    forwards = [cell.start for cell in simulation.cells if cell.direction == F]
    assert forwards == [0, 2, 10, 12]


def test_weights_fetched_ahead_cost_nothing_but_the_first():
    network = Network(Link(0.25, 0.5))
    costs = Costs(weight_units=1, network=network, fetch_contention=False)
    hidden = simulate(3, 3, 3, fully_sharded, costs=costs)
    assert [span[0] for span in hidden.span] == [0, 0.75, 0.75]
    assert hidden.makespan == 9.75
    waiting = replace(costs, prefetch=0)
    stalled = simulate(3, 3, 3, fully_sharded, costs=waiting)
    assert stalled.makespan == 9 + 0.75 * 4
    fetches = [span for span in stalled.timeline().spans if span.kind == "FETCH"]
    assert len(fetches) == 3 * 4


def test_fetches_that_take_longer_than_the_work_before_hold_it_up():
    costs = Costs(weight_units=1, network=Network(Link(0, 3)), prefetch=1)
    near = simulate(3, 3, 3, fully_sharded, costs=costs).makespan
    costs = Costs(weight_units=1, network=Network(Link(0, 3)), prefetch=2)
    far = simulate(3, 3, 3, fully_sharded, costs=costs).makespan
    assert 9 < far < near


def test_gradients_of_replicas_go_round_a_ring():
    network = Network(Link(0.5, 0.125))
    costs = Costs(weight_units=6, network=network, reduce_gradients=True)
    simulation = simulate(3, 2, 3, data_parallel, costs=costs)
    ring = 2 * 2 * (0.5 + 6 / 3 * 0.125)
    assert [(r.stage, r.start, r.end) for r in simulation.reductions] == [
        (1, 4, 4 + ring),
        (0, 4 + ring, 4 + 2 * ring),
    ]
    assert simulation.makespan == 4 + 2 * ring
    after = Costs(weight_units=6, network=network, reduce_gradients=True, overlap_transfers=False)
    assert simulate(3, 2, 3, data_parallel, costs=after).reductions[0].start == 6


def test_sharded_gradients_go_to_their_keeper():
    costs = Costs(weight_units=4, network=Network(Link(0.5, 0.125)), reduce_gradients=True)
    simulation = simulate(3, 3, 3, fully_sharded, costs=costs)
    assert [r.end - r.start for r in simulation.reductions] == [2 * 0.5 + 4 * 0.125] * 3
    assert not simulate(3, 3, 3, pipeline, costs=costs).reductions


# ---- bad input -------------------------------------------------------------------------------


def raises(work):
    if work.stage == 1:
        raise KeyError("no such stage")
    return ComputeAndWeightWorkers(0, 0)


BAD = {
    "worker out of range": (
        lambda: simulate(2, 3, 1, pipeline),
        "pipeline puts f2.0 on compute worker 2; workers are 0 to 1",
    ),
    "weight worker out of range": (
        lambda: simulate(2, 2, 1, lambda w: (0, -1), title="mine"),
        "mine puts f0.0 on weight worker -1",
    ),
    "no workers": (lambda: simulate(0, 2, 1, pipeline), "num_workers is 0"),
    "no stages": (lambda: simulate(2, 0, 1, pipeline), "num_stages is 0"),
    "no batches": (lambda: simulate(2, 2, 0, pipeline), "num_batches is 0"),
    "half a batch": (lambda: simulate(2, 2, 1.5, pipeline), "num_batches is 1.5"),
    "strategy raises": (lambda: simulate(2, 2, 1, raises), "raises raises KeyError for f1.0"),
    "strategy returns one": (
        lambda: simulate(2, 2, 1, lambda w: w.stage, title="mine"),
        "mine returns 0 for f0.0; it must return ComputeAndWeightWorkers",
    ),
    "strategy returns None": (
        lambda: simulate(2, 2, 1, lambda w: None, title="mine"),
        "mine returns None for f0.0",
    ),
    "strategy returns floats": (
        lambda: simulate(2, 2, 1, lambda w: (w.stage / 1, 0), title="mine"),
        r"mine returns \(0.0, 0\) for f0.0",
    ),
    "negative duration": (
        lambda: simulate(2, 2, 1, pipeline, costs=Costs(forward=[1, -1])),
        "forward of stage 1 is -1; it must not be negative",
    ),
    "not a number": (
        lambda: simulate(2, 2, 1, pipeline, costs=Costs(backward=float("nan"))),
        "costs: backward is nan; it must be a finite number",
    ),
    "negative latency": (lambda: Link(-1), "link: latency_seconds is -1; it must not be negative"),
    "costs for other stages": (
        lambda: simulate(2, 2, 1, pipeline, costs=Costs(forward=[1, 1, 1])),
        "forward has 3 values for 2 stages",
    ),
    "weight gradient above backward": (
        lambda: simulate(2, 2, 1, pipeline, costs=Costs(weight_gradient=3)),
        "weight_gradient of stage 0 is 3; it must not exceed",
    ),
    "priority raises": (
        lambda: simulate(2, 2, 1, pipeline, lambda w: 1 / 0),
        "priority raises ZeroDivisionError for f0.0",
    ),
    "priority cannot be compared": (
        lambda: simulate(2, 2, 2, pipeline, lambda w: w.batch or "first"),
        "keys of the priority cannot be compared",
    ),
    "cap of zero": (
        lambda: simulate(2, 2, 1, pipeline, max_in_flight=0),
        "max_in_flight of worker 0 is 0",
    ),
    "too few caps": (
        lambda: simulate(2, 2, 1, pipeline, max_in_flight=[1]),
        "1 values for 2 workers",
    ),
    "order and priority": (
        lambda: simulate(2, 2, 1, pipeline, OldestBatchFirst(2, 1), order=lambda w: []),
        "order fixes the whole schedule",
    ),
    "order leaves works out": (
        lambda: simulate(2, 2, 1, pipeline, order=lambda w: []),
        "the order leaves out f0.0, which the strategy puts on worker 0",
    ),
    "order on the wrong worker": (
        lambda: simulate(2, 2, 1, pipeline, order=lambda w: [Work(1 - w, 0, F)]),
        "the order puts f1.0 on worker 0, but the strategy puts it on worker 1",
    ),
    "order with something twice": (
        lambda: simulate(1, 1, 1, pipeline, order=lambda w: [Work(0, 0, F)] * 2),
        "worker 0 lists f0.0 twice",
    ),
    "order of something else": (
        lambda: simulate(1, 1, 1, pipeline, order=lambda w: ["f0.0"]),
        "worker 0 lists 'f0.0'; it must list Work",
    ),
    "order beyond the batches": (
        lambda: simulate(1, 1, 1, pipeline, order=lambda w: [Action(0, "F", 1)]),
        "worker 0 lists f0.1; stages are 0 to 0, batches 0 to 0",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, said = BAD[case]
    with pytest.raises(SimulationError, match=said) as error:
        call()
    assert "\n" not in str(error.value)


def test_order_that_deadlocks_names_each_workers_blocked_work():
    def order(worker):
        batches = (0, 1) if worker == 0 else (1, 0)
        return [Work(worker, b, d) for b in batches for d in (F, B)]

    with pytest.raises(SimulationError) as error:
        simulate(2, 2, 2, pipeline, order=order)
    assert "worker 0 is blocked at b0.0; worker 1 is blocked at f1.1" in str(error.value)


def test_cap_that_deadlocks_names_each_workers_blocked_work():
    def there_and_back(work):
        worker = 1 if work.stage == 1 else 0
        return ComputeAndWeightWorkers(worker, worker)

    with pytest.raises(SimulationError, match=r"too low.*worker 0 is blocked at f2.0"):
        simulate(2, 3, 1, there_and_back, max_in_flight=1)

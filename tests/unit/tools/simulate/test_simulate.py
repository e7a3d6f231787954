"""Features that the notebook's simulator does not have (costs, orders, limits), and bad input."""

import itertools
import json
import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from titanlite.schedule import SCHEDULES, Action, make_schedule
from titanlite.tools.simulate import (
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
from titanlite.tools.simulate.gpu import GPU
from titanlite.tools.simulate.schemes import Workload, run_scheme

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "pipeline_bubbles.json").read_text())
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


def longest_span(simulation):
    return max(end - start for start, end in simulation.span)


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
                            took = longest_span(simulation)
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
        simulation = simulate_schedule(schedule, costs)
        rate = 1 - max(simulation.busy) / longest_span(simulation)
        assert round(rate, 4) == profile[name], name


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 20)])
def test_zbv_has_no_bubble_on_any_rank_if_all_passes_take_the_same(ranks, microbatches):
    simulation = simulate_schedule(make_schedule("ZBV", ranks, microbatches))
    assert longest_span(simulation) == 2 * microbatches * 3
    assert max(simulation.peak_activations) == 2 * ranks
    uneven = simulate_schedule(
        make_schedule("ZBV", ranks, microbatches), Costs(forward=2, backward=5, weight_gradient=2)
    )
    assert longest_span(uneven) > 2 * microbatches * 7


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


def test_numpy_numbers_are_numbers():
    place = np.arange(4)
    simulation = simulate(
        np.int64(4),
        np.int32(4),
        np.int64(3),
        lambda work: (place[work.stage], place[work.stage]),
        max_in_flight=np.int64(2),
        costs=Costs(forward=np.float64(0.1), backward=np.array([0.2] * 4, np.float32)),
    )
    plain = simulate(4, 4, 3, pipeline, max_in_flight=2, costs=Costs(0.1, 0.2))
    assert simulation.cells == plain.cells
    assert {type(cell.worker) for cell in simulation.cells} == {int}


@pytest.mark.parametrize(
    ("forward", "backward", "makespan"),
    [
        (1, 2, 46),
        (0.1, 0.2, 4.6),
        (0.3, 0.6, 13.8),
        (0.7, 1.4, 32.2),
        (1e-9, 2e-9, 4.6e-8),
        (Fraction(1, 3), Fraction(2, 3), Fraction(46, 3)),
        (Decimal("0.1"), 0.2, Fraction(23, 5)),
    ],
)
def test_ties_of_decimals_are_ties(forward, backward, makespan):
    costs = Costs(forward, backward)
    simulation = run_scheme("LoopedPipeline", Workload(workers=6, batches=12, costs=costs))
    assert simulation.makespan == makespan
    assert type(simulation.makespan) is type(makespan)
    assert f"makespan {float(makespan):g} " in repr(simulation)


TITLES = {
    "Pipeline": {},
    "Pipeline: priority oldest-stage": {"priority": "oldest-stage"},
    "Pipeline: priority backward, 4 3 2 1 in flight": {
        "priority": "backward",
        "max_in_flight": [4, 3, 2, 1],
    },
    "Pipeline: 2 in flight, split backward": {"max_in_flight": 2, "split_backward": True},
    "Pipeline: forward 0.5, backward 1 2 3 4": {"costs": Costs(0.5, lambda stage: stage + 1)},
    "Pipeline: activations 2, latency 0.1, nodes of 2, inside 0.5 per unit, no overlap": {
        "costs": Costs(
            activation_units=2, network=Network(Link(0.1), Link(0, 0.5), 2), overlap_transfers=False
        )
    },
    "Pipeline: weights 1 to 8, latency 1, prefetch 2, gradients reduced": {
        "stages": 8,
        "workers": 8,
        "costs": Costs(
            weight_units=list(range(1, 9)),
            network=Network(Link(1)),
            prefetch=2,
            reduce_gradients=True,
        ),
    },
    "Pipeline: forward 1 ms, backward 2 ms, weights 2 GiB, 4 GiB/s": {
        "costs": Costs(
            Fraction(1, 1000),
            Fraction(2, 1000),
            weight_units=2**31,
            network=Network(Link(0, Fraction(1, 2**32))),
            time_unit="s",
            size_unit="B",
        )
    },
}


@pytest.mark.parametrize("title", TITLES)
def test_titles_tell_pictures_apart(title):
    simulation = run_scheme("Pipeline", Workload(**TITLES[title]))
    assert simulation.title == "Pipeline"
    assert simulation.timeline().title == title


def test_title_tells_the_group_size_and_what_is_of_your_own():
    looped = run_scheme("LoopedPipeline", Workload(workers=6, group_size=2))
    assert looped.timeline().title == "LoopedPipeline: groups of 2"

    def latest_first(work):
        return -work.batch

    own = simulate(2, 2, 2, pipeline, latest_first)
    assert own.timeline().title == "pipeline: priority latest_first"


def test_stages_cut_finer_take_exactly_a_part():
    whole = Workload(workers=4, batches=8, costs=Costs(0.3, 0.6))
    assert run_scheme("Interleaved1F1B", whole).makespan == 8.55
    assert run_scheme("1F1B", whole).makespan == 9.9
    thirds = Workload(workers=4, batches=8, costs=Costs(Fraction(1, 3), Fraction(2, 3)))
    assert run_scheme("Interleaved1F1B", thirds).makespan == Fraction(19, 2)


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
        raise KeyError("no such\nstage")
    return ComputeAndWeightWorkers(0, 0)


def changing(*answers):
    """A function whose answers follow each other, whatever it is asked."""
    following = itertools.cycle(answers)
    return lambda *asked: next(following)


def fails_once():
    calls = itertools.count()
    return lambda work: (0, 0 // next(calls))


def two(strategy=pipeline, *more, **options):
    return lambda: simulate(2, 2, 1, strategy, *more, **options)


def one(**options):
    return lambda: simulate(1, 1, 1, pipeline, **options)


BAD = {
    "worker out of range": (
        lambda: simulate(2, 3, 1, pipeline),
        "pipeline puts f2.0 on compute worker 2; workers are 0 to 1",
    ),
    "weight worker out of range": (
        two(lambda w: (0, -1), title="mine"),
        "mine puts f0.0 on weight worker -1",
    ),
    "no workers": (lambda: simulate(0, 2, 1, pipeline), "num_workers is 0"),
    "half a batch": (lambda: simulate(2, 2, 1.5, pipeline), "num_batches is 1.5"),
    "strategy raises": (two(raises), "raises raises KeyError for f1.0"),
    "strategy returns one": (
        two(lambda w: w.stage, title="mine"),
        "mine returns 0 for f0.0; it must return ComputeAndWeightWorkers",
    ),
    "negative duration": (
        two(pipeline, costs=Costs(forward=[1, -1])),
        "forward of stage 1 is -1; it must not be negative",
    ),
    "not a number": (
        two(pipeline, costs=Costs(backward=float("nan"))),
        "costs: backward is nan; it must be a finite number",
    ),
    "backward is 1e308": (
        two(costs=Costs(backward=[1e308, 1])),
        r"costs: backward of stage 0 is 1e\+308; it must be 0 or between 1e-100 and 1e100",
    ),
    "a Decimal of millions of digits": (
        two(costs=Costs(forward=Decimal("1e999999999"))),
        "costs: forward is Decimal.*; it must be 0 or between",
    ),
    "both costs 0": (
        two(costs=Costs(forward=0, backward=[0, 0.0])),
        "costs: forward and backward are both 0",
    ),
    "duration that raises": (
        two(costs=Costs(forward=lambda stage: 1 / stage)),
        "costs: forward raises ZeroDivisionError for stage 0: division by zero",
    ),
    "duration that changes": (
        two(costs=Costs(backward=changing(1, 2, 3))),
        "costs: backward of stage 0 is first 1 and then 2",
    ),
    "activations of nan": (
        lambda: Costs(activation_units=math.nan),
        "costs: activation_units is nan; it must be a finite number",
    ),
    "half a prefetch": (lambda: Costs(prefetch=0.5), "prefetch is 0.5; it must be an integer"),
    "network of another kind": (lambda: Costs(network=Link(1)), "network is Link.*a Network"),
    "costs of another kind": (two(pipeline, costs={}), "costs is {}; it must be a Costs"),
    "nan latency": (lambda: Link(math.nan), "link: latency_seconds is nan"),
    "half a node": (
        lambda: Network(Link(1), workers_per_node=1.5),
        "workers_per_node is 1.5; it must be an integer of at least 1",
    ),
    "links of another kind": (lambda: Network(1), "between and inside must be Links"),
    "GPU sends nan": (lambda: GPU(0).send(1, "it", math.nan), "data_size_units of it is nan"),
    "GPU computes for infinity": (lambda: GPU(0).compute("it", math.inf), "compute_units is inf"),
    "strategy that changes": (
        lambda: simulate(2, 1, 1, changing((0, 0), (0, 0), (1, 1)), title="mine"),
        "mine changes its answer when it is called again for f0.0",
    ),
    "strategy that fails once": (
        lambda: simulate(2, 1, 1, fails_once(), title="mine"),
        "mine changes its answer when it is called again for f0.0",
    ),
    "priority that changes": (
        two(pipeline, changing(1, 2, 3)),
        "the priority changes its answer when it is called again for f0.0",
    ),
    "priority of nan": (two(pipeline, lambda w: math.nan), "the priority is nan for f0.0"),
    "priority for another size": (
        lambda: simulate(2, 2, 4, pipeline, OldestStageFirst(2, 3)),
        "made for 2 stages and 3 batches; make it for 2 and 4",
    ),
    "order that changes": (
        one(order=changing([Work(0, 0, F), Work(0, 0, B)], [])),
        "the order changes its answer",
    ),
    "order of an unknown direction": (
        one(order=lambda w: [Work(0, 0, 7)]),
        r"lists Work\(stage=0, batch=0, direction=7\); it must be a Work\(stage, batch, dir",
    ),
    "cap that raises": (
        two(pipeline, max_in_flight=lambda worker: 1 / worker),
        "max_in_flight raises ZeroDivisionError",
    ),
    "cap of nan": (two(pipeline, max_in_flight=math.nan), "max_in_flight of worker 0 is nan"),
    "costs for other stages": (
        two(pipeline, costs=Costs(forward=[1, 1, 1])),
        "forward has 3 values for 2 stages",
    ),
    "weight gradient above backward": (
        two(pipeline, costs=Costs(weight_gradient=3)),
        "weight_gradient of stage 0 is 3; it must not exceed",
    ),
    "priority raises": (
        two(pipeline, lambda w: 1 / 0),
        "priority raises ZeroDivisionError for f0.0",
    ),
    "priority cannot be compared": (
        lambda: simulate(2, 2, 2, pipeline, lambda w: w.batch or "first"),
        "keys of the priority cannot be compared",
    ),
    "cap of zero": (two(pipeline, max_in_flight=0), "max_in_flight of worker 0 is 0"),
    "too few caps": (two(pipeline, max_in_flight=[1]), "1 values for 2 workers"),
    "order and priority": (
        two(pipeline, OldestBatchFirst(2, 1), order=lambda w: []),
        "order fixes the whole schedule",
    ),
    "order leaves works out": (
        two(pipeline, order=lambda w: []),
        "the order leaves out f0.0, which the strategy puts on worker 0",
    ),
    "order on the wrong worker": (
        two(pipeline, order=lambda w: [Work(1 - w, 0, F)]),
        "the order puts f1.0 on worker 0, but the strategy puts it on worker 1",
    ),
    "order with something twice": (
        one(order=lambda w: [Work(0, 0, F)] * 2),
        "worker 0 lists f0.0 twice",
    ),
    "order of something else": (
        one(order=lambda w: ["f0.0"]),
        "worker 0 lists 'f0.0'; it must be a Work",
    ),
    "order beyond the batches": (
        one(order=lambda w: [Action(0, "F", 1)]),
        "lists Work.*a stage of 0 to 0, a batch of 0 to 0 and a Direction",
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

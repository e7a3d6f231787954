"""The ladder: the published times of 0D and 1D, correct values on every rung, and its parts."""

import json
import time
from fractions import Fraction
from pathlib import Path

import pytest

from titanlite.mesh.parallel_dims import Grid
from titanlite.tools.learn.ladder.rungs import (
    RUNGS,
    Rung,
    check_outcomes,
    ladder_table,
    make_rungs,
    run_rung,
)
from titanlite.tools.simulate import Link, Network, SimulationError
from titanlite.tools.simulate import gpu as gpu_module
from titanlite.tools.simulate.collectives import (
    all_to_all,
    gather_rows,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    scatter_rows,
)
from titanlite.tools.simulate.gpu import GPU, Cluster
from titanlite.tools.simulate.train_step import StepWorkload, make_train_step, single_process

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "latency_ladder.json").read_text())


@pytest.fixture(scope="module")
def measured():
    return {rung.name: run_rung(rung)[0] for rung in RUNGS}


def test_constants_and_workload():
    workload = StepWorkload()
    assert GOLDEN["seconds_per_compute_unit"] == gpu_module.SECONDS_PER_COMPUTE_UNIT
    assert GOLDEN["network_base_latency_seconds"] == gpu_module.NETWORK_BASE_LATENCY_SECONDS
    assert GOLDEN["seconds_per_data_unit"] == gpu_module.SECONDS_PER_DATA_UNIT
    assert workload.items == GOLDEN["items"]
    assert workload.layers == GOLDEN["layers"]
    assert workload.compute_units_per_item == GOLDEN["compute_units_per_item"]
    assert workload.gradient_units == GOLDEN["gradient_size_units"]
    assert workload.activation_units == GOLDEN["activation_units_at_a_layer_boundary_per_item"]
    assert workload.key_value_units == GOLDEN["key_value_units_per_item_and_layer"]
    assert workload.experts == GOLDEN["experts_per_layer"]


@pytest.mark.parametrize(
    ("rung", "key"),
    [
        ("0D", "0d_seconds"),
        ("1D DP, relay", "1d_relay_total_seconds"),
        ("1D DP, ring", "1d_ring_total_seconds"),
    ],
)
def test_published_times(measured, rung, key):
    assert measured[rung].seconds == pytest.approx(GOLDEN[key], abs=1e-9)


def test_pipeline_times_by_hand(measured):
    """2 stages, 8 items, 1F1B: the step takes all work of the last rank plus fill and drain."""
    forward, backward = 10 * 0.1 / 3, 20 * 0.1 / 3
    send, receive = 0.05 + 8 * 0.01, 0.05
    first_input = forward + send
    last_stage = first_input + 8 * (receive + forward + backward + send)
    own_backward = last_stage + receive + backward
    ring = 2 * (0.05 + 250 / 2 * 0.01)
    assert measured["2D DP x PP"].seconds == pytest.approx(own_backward + ring)


def test_tensor_parallel_times_by_hand(measured):
    all_reduce = 2 * (0.05 + 8 / 2 * 0.01)
    item_and_layer = 5 / 2 * 0.1 + 4 * all_reduce
    ring = 2 * (0.05 + 250 / 2 * 0.01)
    assert measured["2D DP x TP"].seconds == pytest.approx(8 * 4 * item_and_layer + ring)


def test_memory_by_hand(measured):
    states = 4 * GOLDEN["gradient_size_units"]
    assert measured["0D"].memory_units == states + 8 * 4
    assert measured["2D DP x PP"].memory_units == states / 2 + 2 * 8 * 2
    assert measured["3D DP x PP x TP"].memory_units == states / 4 + 2 * 8 * 2


SIX = StepWorkload(items=8, tokens=6, width=6)  # divided by 2 and by 3


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 8},
        {"pp": 4},
        {"tp": 3},
        {"cp": 3},
        {"ep": 4},
        {"dp": 2, "ep": 2, "cp": 2},
        {"pp": 4, "tp": 3, "cp": 2, "dp": 2},
        {"pp": 2, "dp": 2, "ep": 2, "cp": 2, "tp": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(("microbatch_items", "overlap"), [(1, False), (None, True)])
def test_every_arrangement_computes_what_one_process_does(degrees, microbatch_items, overlap):
    rung = Rung("any", degrees, overlap=overlap, microbatch_items=microbatch_items)
    measured, cluster = run_rung(rung, SIX)
    assert measured.num_ranks == Grid(**degrees).world_size == len(cluster.gpus)
    assert measured.seconds > 0


def outcomes_of(rung):
    return Cluster(rung.grid.world_size).run(make_train_step(rung.grid, StepWorkload()))


@pytest.mark.parametrize(
    ("degrees", "spoil", "said"),
    [
        (
            {"dp": 2},
            lambda outcomes: outcomes[0].losses.update({3: 1}),
            "the loss of item 3 is 1, not 14402996857",
        ),
        ({"dp": 2}, lambda outcomes: outcomes[1].losses.pop(9), "the loss of item 9 is None"),
        (
            {"tp": 2},
            lambda outcomes: outcomes[1].gradients.update(
                {"layers.2.attention.key": outcomes[0].gradients["layers.2.attention.key"]}
            ),
            "rank 1 has gradients of layers.2.attention.key that differ",
        ),
        (
            {"pp": 2},
            lambda outcomes: outcomes[1].weights["layers.3.feed_forward.up"][0].reverse(),
            "rank 1 has weights of layers.3.feed_forward.up that differ",
        ),
        (
            {"ep": 2},
            lambda outcomes: outcomes[1].gradients.pop("layers.0.experts.2.down"),
            "rank 1 has gradients of",
        ),
    ],
    ids=["loss", "item missing", "other shard", "weight", "expert missing"],
)
def test_wrong_values_are_found(degrees, spoil, said):
    rung = Rung("any", degrees)
    outcomes = outcomes_of(rung)
    check_outcomes(rung, StepWorkload(), outcomes)
    spoil(outcomes)
    with pytest.raises(SimulationError, match=said):
        check_outcomes(rung, StepWorkload(), outcomes)


def test_gradients_of_a_relay_are_complete_on_the_first_and_last_rank(measured):
    rung = measured["1D DP, relay"].rung
    step = make_train_step(rung.grid, StepWorkload(), rung.sum_gradients)
    whole = single_process(StepWorkload()).gradients
    assert [outcome.gradients == whole for outcome in Cluster(4).run(step)] == [
        *(True, False, False, True)
    ]


def test_overlap_hides_what_the_backward_pass_lasts_for(measured):
    """4 items as a batch: backward passes of 3 layers, 4 s, hide 4 of 8.7 s of all-reduces."""
    all_reduces = 4 * 6 * (0.05 + 125 / 4 * 0.01)
    assert measured["1D DP, overlap"].seconds == pytest.approx(8 - 3 * 4 / 3 + all_reduces)
    ring = measured["1D DP, ring"]
    assert measured["1D DP, overlap"].seconds == pytest.approx(ring.seconds - 3.1)
    assert measured["1D DP, overlap"].memory_units == ring.memory_units + 3 * 8 * 4


def test_overlap_gains_little_when_items_run_one_by_one(measured):
    """Gradients are complete only in the last item's backward pass, and the latency is paid more
    often: 15.7 s, against 15.8 s without."""
    one_by_one = run_rung(Rung("any", {"dp": 4}, overlap=True))[0]
    assert one_by_one.seconds == pytest.approx(8 - 1 + 4 * 6 * (0.05 + 125 / 4 * 0.01))
    assert one_by_one.seconds == pytest.approx(measured["1D DP, ring"].seconds - 0.1)


def test_rungs_for_degrees_add_one_axis_at_a_time():
    rungs = make_rungs({"cp": 1, "tp": 2, "dp": 4}, overlap=True, microbatch_items=2)
    assert [rung.name for rung in rungs] == ["0D", "1D DP 4", "2D DP 4 x TP 2"]
    assert [rung.below for rung in rungs] == [None, "0D", "1D DP 4"]
    assert all(rung.overlap and rung.microbatch_items == 2 for rung in rungs[1:])


UNITS = [Fraction(1, 3), Fraction(1, 7), Fraction(1, 10), 1e-9, 1e-3, 100.0]


@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("name", ["2D DP x PP", "4D with CP"])
def test_the_unit_of_time_changes_no_event(measured, monkeypatch, name, unit):
    rung = next(rung for rung in RUNGS if rung.name == name)
    _, before = run_rung(rung)
    times = {
        constant: float_or_fraction(getattr(gpu_module, constant), unit)
        for constant in ("SECONDS_PER_COMPUTE_UNIT", "SECONDS_PER_MEMORY_UNIT")
    }
    for constant, seconds in times.items():
        monkeypatch.setattr(gpu_module, constant, seconds)
    link = Link(float_or_fraction(0.05, unit), float_or_fraction(0.01, unit))
    _, after = run_rung(rung, network=Network(link))
    scale = Fraction(repr(unit)) if isinstance(unit, float) else unit
    assert [gpu.clock * scale for gpu in before.gpus] == [gpu.clock for gpu in after.gpus]
    for one, other in zip(before.gpus, after.gpus, strict=True):
        assert [event._replace(start=0, end=0) for event in one.events] == [
            event._replace(start=0, end=0) for event in other.events
        ]
        ends = [float(Fraction(event.end) * scale) for event in one.events]
        assert [event.end for event in other.events] == pytest.approx(ends, rel=1e-15)


def float_or_fraction(seconds, unit):
    """`seconds` in a unit: a float if the unit is one, without an error of rounding."""
    exact = Fraction(repr(seconds)) * Fraction(repr(unit) if isinstance(unit, float) else unit)
    return float(exact) if isinstance(unit, float) else exact


def test_table_compares_each_rung_with_the_one_below(measured):
    lines = ladder_table(list(measured.values())).splitlines()
    assert len(lines) == 2 * (2 + len(RUNGS)) + 1
    ring = " ".join(line for line in lines if line.startswith("1D DP, ring"))
    assert "15.8" in ring
    assert "16.2 s" in ring
    assert "7.8 s network" in ring


def test_fast_links_inside_a_node_make_tensor_parallelism_pay():
    slow = Network(Link(0.05, 0.01))
    fast = Network(Link(0.05, 0.01), Link(0.005, 0.001), workers_per_node=2)
    rung = next(rung for rung in RUNGS if rung.name == "2D DP x TP")
    assert run_rung(rung, network=fast)[0].seconds < 0.5 * run_rung(rung, network=slow)[0].seconds


def test_gpu_alone_charges_time():
    gpu = GPU(0)
    gpu.compute("item", 20)
    assert gpu.seconds == pytest.approx(2.0)
    gpu.send(1, "gradients", 500)
    gpu.receive(3, "gradients", 500)
    assert gpu.seconds == pytest.approx(2.0 + 5.05 + 0.05)
    assert [event.kind for event in gpu.events] == ["compute", "send", "receive"]
    # 5,000 units of memory take longer than one of compute.
    gpu.compute("lookup", 1, memory_units=5000)
    assert gpu.events[-1].end - gpu.events[-1].start == pytest.approx(0.5)


def test_memory_is_counted():
    gpu = GPU(2)
    gpu.allocate("weights", 6)
    gpu.allocate("activations", 3)
    gpu.free("activations")
    assert gpu.peak_memory_units == 9
    with pytest.raises(SimulationError, match="cannot free activations: it is not allocated"):
        gpu.free("activations")


def test_deadlock_names_what_each_rank_waits_for():
    def program(gpu):
        gpu.receive(1 - gpu.global_rank, "a token", 1)

    with pytest.raises(SimulationError) as error:
        Cluster(2).run(program)
    assert "rank 0 waits for a token from rank 1; rank 1 waits for a token from rank 0" in str(
        error.value
    )


def test_error_on_one_rank_stops_the_others():
    def program(gpu):
        if gpu.global_rank == 1:
            raise RuntimeError("rank 1 is broken")
        gpu.receive(1, "a token", 1)

    with pytest.raises(RuntimeError, match="rank 1 is broken"):
        Cluster(3).run(program)


def test_rank_out_of_range_is_named():
    with pytest.raises(SimulationError, match="GPU 0 sends to rank 2; ranks are 0 to 1"):
        Cluster(2).run(lambda gpu: gpu.send(2, "x", 1) if gpu.global_rank == 0 else None)


def test_real_sleeping_takes_the_virtual_time():
    def program(gpu):
        gpu.compute("work", 0.3)
        gpu.exchange(1 - gpu.global_rank, 1 - gpu.global_rank, "x", 1, gpu.global_rank)

    cluster = Cluster(2, Network(Link(0.01, 0.01)), sleep=True)
    before = time.perf_counter()
    cluster.run(program)
    assert time.perf_counter() - before >= cluster.seconds == pytest.approx(0.05)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_collectives(ranks):
    group = list(range(ranks))
    gathered = Cluster(ranks).run(lambda g: ring_all_gather(g, group, "x", 1, g.global_rank * 10))
    assert gathered == [[10 * rank for rank in group]] * ranks
    values = [[rank + 7, 10 * rank, 1] for rank in group]
    reduced = Cluster(ranks).run(lambda g: ring_all_reduce(g, group, "x", 1, values[g.global_rank]))
    assert reduced == [[sum(column) for column in zip(*values, strict=True)]] * ranks
    parts = [[[rank, part] for part in group] for rank in group]
    scattered = Cluster(ranks).run(
        lambda g: ring_reduce_scatter(g, group, "x", 1, parts[g.global_rank])
    )
    assert scattered == [[sum(group), ranks * rank] for rank in group]

    def exchange(gpu):
        return all_to_all(gpu, group, "x", 1, [[(gpu.global_rank, to)] for to in group])

    assert Cluster(ranks).run(exchange) == [
        [[(source, rank)] for source in group] for rank in group
    ]


def test_rows_are_gathered_in_order_and_scattered_as_sums():
    ranks = [0, 1, 2]
    gathered = Cluster(3).run(lambda g: gather_rows(g, ranks, "x", 3, [[g.global_rank, 5]]))
    assert gathered == [[[0, 5], [1, 5], [2, 5]]] * 3
    cluster = Cluster(3)
    rows = cluster.run(lambda g: scatter_rows(g, ranks, "x", 3, gathered[0]))
    assert rows == [[[0, 15]], [[3, 15]], [[6, 15]]]
    assert cluster.seconds == pytest.approx(2 * (0.05 + 0.01))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Grid(dp=0), "degree of dp is 0, not at least 1"),
        (lambda: Grid(dp=2).coordinates(2), "rank 2 is outside a world of 2"),
        (lambda: Grid(dp=2).rank(tp=0), "no mesh axis 'tp'; the axes are dp"),
        (lambda: Grid(dp=2).rank(dp=2), "position 2 is outside dp, whose degree is 2"),
        (lambda: run_rung(Rung("any", {"dp": 3})), "16 items do not divide evenly over dp x ep"),
        (lambda: run_rung(Rung("any", {"pp": 3})), "4 layers do not divide evenly over pp = 3"),
        (lambda: run_rung(Rung("any", {"tp": 3})), "4 channels do not divide evenly over tp = 3"),
        (lambda: run_rung(Rung("any", {"cp": 8})), "4 tokens do not divide evenly over cp = 8"),
        (
            lambda: run_rung(Rung("any", {"dp": 4}, microbatch_items=3)),
            "4 items of a rank do not divide evenly over microbatches of size = 3",
        ),
        (
            lambda: run_rung(Rung("any", {"dp": 2048}), StepWorkload(items=2048)),
            "2048 ranks; .* 1024",
        ),
        (lambda: run_rung(Rung("any", {}), StepWorkload(items=10**9)), "6.9e.12 multiplications"),
        (lambda: StepWorkload(items=0), "items is 0; it must be at least 1"),
        (
            lambda: StepWorkload(gradient_units=float("nan")),
            "gradient_units is nan; it must be a finite number",
        ),
        (lambda: Cluster(0), "at least one rank"),
    ],
)
def test_bad_input_is_named(call, said):
    with pytest.raises((SimulationError, ValueError), match=said):
        call()


def test_timeline_of_a_rung_shows_every_pass():
    _, cluster = run_rung(Rung("any", {"pp": 2}))
    spans = cluster.timeline("2 stages").spans
    assert sum(span.kind == "F" for span in spans) == 16 * 4 * 2
    assert sum(span.kind == "B" for span in spans) == 16 * 4 * 2
    step = make_train_step(Grid(pp=1, dp=1, ep=1, cp=1, tp=1), StepWorkload(items=1))
    assert step(GPU(0)).losses == {0: 11163289892}


def test_overlapped_messages_take_no_time_of_the_gpu():
    def program(gpu):
        other = 1 - gpu.global_rank
        with gpu.overlapped():
            gpu.exchange(other, other, "first", 100, None)
        gpu.compute("work", 20)
        with gpu.overlapped():
            gpu.exchange(other, other, "second", 100, None)
            gpu.exchange(other, other, "third", 100, None)
        gpu.join("all")
        return gpu.seconds

    cluster = Cluster(2)
    # The first message is hidden by 2 s of work; the others take 0.05 + 1 s each, in a row.
    assert cluster.run(program) == pytest.approx([4.1] * 2)
    gpu = cluster.gpus[0]
    assert gpu.time_in("send", "receive") == 0
    assert gpu.time_in("join") == Fraction("2.1")
    kinds = [span.kind for span in cluster.timeline("overlap").spans if span.row == 0]
    assert kinds == ["REDUCE"] * 3

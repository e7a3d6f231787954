"""Bytes and seconds: the memory of simulated workers, owners' links, and units."""

import itertools
import xml.etree.ElementTree as ET
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.cli import main
from titanlite.schedule import make_schedule
from titanlite.tools.figures.memory import MemoryPanel, save_memory
from titanlite.tools.simulate import (
    Costs,
    Direction,
    Link,
    Network,
    Work,
    simulate,
    simulate_schedule,
)

F, B, W = Direction.FORWARD, Direction.BACKWARD, Direction.WEIGHT
SIZES = {"weight_units": 3, "gradient_units": 5, "optimizer_units": 7, "kept_units": 11}


def peaks(simulation):
    return [list(simulation.memory.at_peak(w).values()) for w in range(simulation.num_workers)]


def test_a_pipeline_holds_what_its_formula_says():
    """1F1B: rank r of p holds the activations of p - r microbatches."""
    simulation = simulate_schedule(make_schedule("1F1B", 4, 8), Costs(**SIZES))
    assert peaks(simulation) == [[3, 5, 7, 11 * (4 - rank), 0] for rank in range(4)]
    assert simulation.peak_memory == [15 + 11 * (4 - rank) for rank in range(4)]
    # Before its first forward, the last rank has weights and optimizer state.
    assert simulation.memory.curve(3)[:2] == [(0, (3, 0, 7, 0, 0)), (3, (3, 0, 7, 11, 0))]


def test_sizes_have_the_defaults_of_a_plain_model():
    simulation = simulate_schedule(
        make_schedule("1F1B", 2, 2), Costs(weight_units=3, activation_units=4)
    )
    assert peaks(simulation) == [[3, 3, 0, 8, 0], [3, 3, 0, 4, 0]]
    nothing = simulate_schedule(make_schedule("1F1B", 2, 2))
    assert not nothing.costs.has_sizes
    assert nothing.peak_memory == [0, 0]


placements = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=18, max_size=18)


@settings(max_examples=60, deadline=None)
@given(
    placed=placements,
    link=st.none() | st.builds(Link, st.integers(0, 2), st.fractions(0, 2, max_denominator=3)),
    reduces=st.booleans(),
    splits=st.booleans(),
)
def test_memory_is_what_a_plain_count_gives(placed, link, reduces, splits):
    """At each moment, add what the definition says, from the cells alone."""

    def strategy(work):
        return placed[work.batch * 6 + work.stage * 2 + work.direction]

    network = link and Network(link)
    costs = Costs(network=network, reduce_gradients=bool(network and reduces), **SIZES)
    simulation = simulate(3, 3, 3, strategy, costs=costs, split_backward=splits)
    cells = {cell[3:]: cell for cell in simulation.cells}
    owners = [{strategy(Work(s, b, d))[1] for b in range(3) for d in (F, B)} for s in range(3)]
    reduced = {one.stage: one for one in simulation.reductions}
    fetches = [span for span in simulation.timeline().spans if span.kind == "FETCH"]

    def held(worker, now):
        sizes = [0, 0, 0, 0]
        for stage in range(3):
            is_owner = worker in owners[stage]
            sizes[0] += 3 * is_owner
            sizes[2] += 7 * is_owner
            makers = [cells[stage, b, W if splits else B] for b in range(3)]
            begun = any(cell.worker == worker and cell.start <= now for cell in makers)
            one = reduced.get(stage)
            if one is not None:
                computes = any(cell.worker == worker for cell in makers)
                begun &= is_owner or now < one.end
                begun |= is_owner and not computes and one.start <= now
            sizes[1] += 5 * begun
            for batch in range(3):
                last = cells[stage, batch, W if splits else B]
                if last.worker == worker:
                    sizes[3] += 11 * (cells[stage, batch, F].start <= now < last.end)
        return tuple(sizes)

    for worker in range(3):
        curve = simulation.memory.curve(worker)
        ends = [at for at, _ in curve[1:]] + [simulation.makespan]
        for (at, sizes), end in zip(curve, ends, strict=True):
            middle = (Fraction(at) + Fraction(end)) / 2
            if at < end:
                assert sizes[:4] == held(worker, middle)
        remote = sum(placed[b * 6 + s * 2 + d][0] == worker != placed[b * 6 + s * 2 + d][1]
                     for b, s, d in itertools.product(range(3), range(3), (F, B)))  # fmt: skip
        if network is not None:
            assert sum(span.row == worker for span in fetches) == remote
        assert any(sizes[4] for _, sizes in curve) == bool(remote)
        assert simulation.peak_memory[worker] == max(sum(sizes) for _, sizes in curve)


def test_fetched_weights_are_held_from_the_fetch_to_the_end_of_the_work():
    costs = Costs(weight_units=1, network=Network(Link(1, 1)), prefetch=0)
    simulation = simulate(2, 1, 1, lambda work: (1, 0), costs=costs)
    fetched = [(at, sizes[4]) for at, sizes in simulation.memory.curve(1)]
    # Fetch 0 to 2, forward 2 to 3, fetch 3 to 5, backward 5 to 7. Freed and fetched at once at 3.
    assert fetched[0] == (0, 1)
    assert {size for _, size in fetched} == {1}
    free = simulate(2, 1, 1, lambda work: (1, 0), costs=Costs(weight_units=1))
    assert {size for _, size in ((at, s[4]) for at, s in free.memory.curve(1))} == {1}


# ---- owners ---------------------------------------------------------------------------------


def fetch_spans(simulation):
    return sorted(
        (span.start, span.end, span.row)
        for span in simulation.timeline().spans
        if span.kind == "FETCH"
    )


def from_one_keeper(work):
    return 1 + work.batch, 0


def test_a_keeper_serves_one_fetch_at_a_time():
    costs = Costs(weight_units=1, network=Network(Link(Fraction(1, 4), 2)), prefetch=0)
    simulation = simulate(4, 1, 3, from_one_keeper, costs=costs)
    assert fetch_spans(simulation)[:3] == [(0, 2.25, 1), (2, 4.25, 2), (4, 6.25, 3)]
    shared = Costs(weight_units=1, network=costs.network, prefetch=0, fetch_contention=False)
    free = simulate(4, 1, 3, from_one_keeper, costs=shared)
    assert fetch_spans(free)[:3] == [(0, 2.25, 1), (0, 2.25, 2), (0, 2.25, 3)]
    assert free.makespan < simulation.makespan


def test_links_inside_and_between_nodes_are_served_apart():
    network = Network(Link(0, 2), inside=Link(0, 2), workers_per_node=2)
    costs = Costs(weight_units=1, network=network, prefetch=0)
    spans = fetch_spans(simulate(4, 1, 3, from_one_keeper, costs=costs))
    assert spans[:3] == [(0, 2, 1), (0, 2, 2), (2, 4, 3)]


def test_a_short_gap_of_a_keeper_is_used():
    """Worker 1 takes stage 0 (size 1) and, far later, stage 1; worker 2's fetch fits between."""
    costs = Costs(forward=[6, 1], weight_units=[1, 2], network=Network(Link(0, 1)), prefetch=0)
    spans = fetch_spans(simulate(3, 2, 2, from_one_keeper, costs=costs))
    assert spans[:4] == [(0, 1, 1), (1, 2, 2), (7, 9, 1), (9, 11, 2)]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    forward=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    prefetch=st.integers(0, 2),
    latency=st.integers(0, 2),
)
def test_no_two_fetches_share_a_keeper_s_link(sizes, forward, prefetch, latency):
    network = Network(Link(latency, 1))
    costs = Costs(forward=forward, weight_units=sizes, network=network, prefetch=prefetch)
    simulation = simulate(5, 3, 4, from_one_keeper, costs=costs)
    spans = fetch_spans(simulation)
    assert len(spans) == sum(2 * 4 for size in sizes if size)
    for (_, end, _), (start, _, _) in itertools.pairwise(spans):
        assert start >= end - latency
    for worker in range(1, 5):
        own = [span[:2] for span in spans if span[2] == worker]
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(own))


# ---- units -----------------------------------------------------------------------------------


def test_seconds_and_bytes_in_the_command(tmp_path, capsys):
    files = {name: tmp_path / name for name in ("memory.png", "memory.svg", "time.svg")}
    arguments = (
        "simulate FSDP --workers 2 --batches 2 --forward 10ms --backward 20ms --latency 0 "
        "--weight-units 1GiB --optimizer-units 2GiB --kept-units 512MiB --bandwidth 1TiB/s"
    )
    for option, file in (("--memory", "memory.png"), ("--memory", "memory.svg")):
        assert main([*arguments.split(), "--quiet", option, str(files[file])]) == 0
    assert main([*arguments.split(), "--width", "120", "--svg", str(files["time.svg"])]) == 0
    printed = capsys.readouterr().out
    assert "makespan 61.0 ms (lower bound 60.0 ms)" in printed
    assert "peak memory 6.50 GiB" in printed
    # In its backward: both stages' gradients, one activation, one fetched stage.
    row = next(line for line in printed.splitlines() if line.startswith("rank 1  "))
    assert " ".join(row.split()[2:14]) == "1 GiB 2 GiB 2 GiB 512 MiB 1 GiB 6.50 GiB"
    assert files["memory.png"].read_bytes().startswith(b"\x89PNG")
    for file in ("memory.svg", "time.svg"):
        assert ET.parse(files[file]).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    drawn = files["time.svg"].read_text()
    assert ">ms<" in drawn
    assert "memory, by rank, GiB" in drawn


def test_pictures_of_many_workers_show_the_fullest(tmp_path):
    panels = [
        MemoryPanel(f"rank {i}", [(0, (1.0, 0.0)), (1, (2.0, 9.0 * (i == 20))), (2, (1, 0))])
        for i in range(40)
    ]
    texts = {"title": "many", "time_unit": "ms", "size_unit": "GiB"}
    save_memory(tmp_path / "many.svg", panels, ["weights", "gradients"], **texts)
    drawn = (tmp_path / "many.svg").read_text()
    assert ET.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"

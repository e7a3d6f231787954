"""`needs`: work that waits for more than its predecessor; context and expert parallelism."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.tools.simulate import (
    Costs,
    Direction,
    Link,
    Network,
    SimulationError,
    Work,
    simulate,
)
from titanlite.tools.simulate.schemes import Workload, run_scheme

F, B, W = Direction.FORWARD, Direction.BACKWARD, Direction.WEIGHT
PAGES = Path(__file__).parents[4] / "docs" / "simulate"


def by_batch(work):
    return work.batch, work.batch


def starts(simulation):
    return {Work(*cell[3:]): cell.start for cell in simulation.cells}


def test_work_starts_when_all_it_needs_has_ended():
    """Work may need several others, and an output may be needed late."""
    needs = {Work(1, 1, F): [Work(0, 0, F), Work(1, 0, F)]}
    costs = Costs(forward=[1, 2], backward=1)
    found = starts(simulate(2, 2, 2, by_batch, needs=lambda w: needs.get(w, []), costs=costs))
    assert found[Work(1, 0, F)] == 1
    assert found[Work(1, 1, F)] == 3
    assert found[Work(1, 1, B)] == 5


def all_parts(work):
    """The attention of stage 1 needs stage 0 of all batches."""
    return [Work(0, batch, F) for batch in range(3)] if work[::2] == (1, F) else []


@pytest.mark.parametrize("overlaps", [True, False])
def test_an_output_is_sent_once_to_each_worker_that_needs_it(overlaps):
    """Three workers each send theirs to two others, one after the other."""
    costs = Costs(activation_units=2, network=Network(Link(1, 2)), overlap_transfers=overlaps)
    simulation = simulate(3, 2, 3, by_batch, needs=all_parts, costs=costs)
    found = starts(simulation)
    sent = 2 * 4 + 1 if overlaps else 2 * (4 + 1)
    assert {found[Work(1, batch, F)] for batch in range(3)} == {1 + sent}
    assert simulation.activation_transmissions == [2, 2, 2]
    spans = [span[:3] for span in simulation.timeline().spans if span.kind == "SEND"]
    assert spans == ([] if overlaps else [(w, t, t + 5) for w in range(3) for t in (1, 6)])


def test_several_receivers_on_one_worker_share_a_message():
    """Both batches of worker 1 need the same output, and the chain of batch 0 goes there too."""

    def strategy(work):
        worker = min(1, work.stage + work.batch)
        return worker, worker

    def needs(work):
        return [Work(0, 0, F)] if work in (Work(0, 1, F), Work(1, 1, F)) else []

    costs = Costs(activation_units=1, network=Network(Link(0, 4)))
    simulation = simulate(2, 2, 2, strategy, needs=needs, costs=costs)
    found = starts(simulation)
    assert found[Work(1, 0, F)] == 5 == min(t for w, t in found.items() if w != Work(0, 0, F))
    # The message there, the gradient back, and the first stage input of batch 0.
    assert simulation.activation_transmissions == [2, 1]


def test_a_fixed_order_with_needs():
    def order(worker):
        return [Work(stage, worker, d) for d in (F, B) for stage in ((0, 1) if d == F else (1, 0))]

    costs = Costs(forward=[1, 1], backward=1)
    needs = {Work(1, 1, F): [Work(0, 0, B)]}
    found = starts(
        simulate(2, 2, 2, by_batch, order=order, needs=lambda w: needs.get(w, []), costs=costs)
    )
    assert found[Work(1, 1, F)] == found[Work(0, 0, B)] + 1 == 4


works = st.builds(Work, st.integers(0, 2), st.integers(0, 3), st.sampled_from([F, B]))


@settings(max_examples=60, deadline=None)
@given(
    placed=st.lists(st.integers(0, 2), min_size=24, max_size=24),
    pairs=st.lists(st.tuples(works, works), max_size=12),
    network=st.none() | st.builds(Link, st.integers(0, 2), st.integers(0, 2)),
    overlaps=st.booleans(),
)
def test_no_work_starts_before_what_it_needs(placed, pairs, network, overlaps):
    """Needs of lower batches go in no circle: all work runs, after its inputs have arrived."""

    def strategy(work):
        worker = placed[(work.batch * 3 + work.stage) * 2 + work.direction]
        return worker, worker

    def needs(work):
        return [before for before, after in pairs if after == work and before.batch < after.batch]

    costs = Costs(
        activation_units=1, network=network and Network(network), overlap_transfers=overlaps
    )
    simulation = simulate(3, 3, 4, strategy, needs=needs, costs=costs)
    cells = {Work(*cell[3:]): cell for cell in simulation.cells}
    assert len(cells) == 24
    for work, cell in cells.items():
        for before in needs(work):
            needed = cells[before]
            takes = 0
            if network is not None and needed.worker != cell.worker:
                takes = network.latency_seconds + network.seconds_per_unit
            assert needed.end + takes <= cell.start
    for worker in range(3):
        own = [cell for cell in simulation.cells if cell.worker == worker]
        assert all(one.end <= two.start for one, two in pairwise(own))
    assert simulation.makespan >= simulation.lower_bound


def test_needing_one_s_predecessor_changes_nothing():
    def predecessor(work):
        if work.direction == F:
            return [Work(work.stage - 1, work.batch, F)] if work.stage else []
        last = work.stage == 3
        return [Work(3, work.batch, F) if last else Work(work.stage + 1, work.batch, B)]

    def pipeline(work):
        return work.stage, work.stage

    plain, needed = (simulate(4, 4, 6, pipeline, needs=needs) for needs in (None, predecessor))
    assert plain.cells == needed.cells
    assert plain.activation_transmissions == needed.activation_transmissions


BAD = {
    "raises": (lambda w: 1 / 0, "needs raises ZeroDivisionError for f0.0: division by zero"),
    "no list": (lambda w: 3, "needs raises TypeError for f0.0"),
    "no work": (lambda w: [3], "needs: f0.0 needs 3; it must be a Work"),
    "beyond": (lambda w: [Work(2, 0, F)], "stage of 0 to 1, a batch of 0 to 1"),
    "weight": (lambda w: [Work(1, 0, W)], "f0.0 needs a weight gradient"),
    "itself": (lambda w: [w], "needs: f0.0 needs itself"),
    "circle": (lambda w: [Work(1, 1 - w.batch, F)] if w.direction == F else [], "go in a circle"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_needs_are_named(case):
    needs, said = BAD[case]
    with pytest.raises(SimulationError) as error:
        simulate(2, 2, 2, by_batch, needs=needs)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def without_needs(name, tmp_path):
    path = tmp_path / name
    path.write_text((PAGES / name).read_text().replace("def needs(", "def not_needed("))
    return str(path)


def test_context_parallelism_waits_for_the_keys_and_values_of_all_parts(tmp_path):
    name, workload = "context_parallel.py", Workload(workers=4, stages=4, batches=8)
    simulation = run_scheme(str(PAGES / name), workload)
    alone = run_scheme(without_needs(name, tmp_path), workload)
    # Two layers and two sequences: each worker gets three parts of keys and values, or of their
    # gradients, for each layer, sequence and direction.
    assert simulation.activation_transmissions == [3 * 2 * 2 * 2] * 4
    assert alone.activation_transmissions == [0] * 4
    assert (alone.makespan, simulation.makespan) == (48, 49.4)
    for work, start in starts(simulation).items():
        if work.direction == F and work.stage % 2:
            first = work.batch - work.batch % 4
            ends = [
                cell.end
                for cell in simulation.cells
                if cell[3] == work.stage - 1 and first <= cell.batch < first + 4 and cell[5] == F
            ]
            assert start >= max(ends) + 0.1 + 0.2


def test_expert_parallelism_waits_for_the_busiest_expert(tmp_path):
    name, workload = "expert_parallel.py", Workload(workers=4, stages=4, batches=16)
    simulation = run_scheme(str(PAGES / name), workload)
    alone = run_scheme(without_needs(name, tmp_path), workload)
    assert alone.busy == simulation.busy == [72, 48, 48, 24]
    assert (alone.makespan, simulation.makespan) == (78.5, 96.2)

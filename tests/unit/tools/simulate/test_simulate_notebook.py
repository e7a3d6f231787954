"""The notebook's cells, unchanged except for the two import lines, reproduce its diagrams."""

import json
from pathlib import Path

import pytest

from titanlite.tools.simulate import BackwardFirst, Simulation, simulate

GOLDEN = json.loads(
    (Path(__file__).parents[3] / "golden" / "parallelsim_notebook.json").read_text()
)
SCHEMES = [name for name in GOLDEN if not name.startswith("_")]

CELLS = [
    """
from importlib import reload

from titanlite.tools import simulate as parallelsim

reload(parallelsim)

from titanlite.tools.simulate import Work, ComputeAndWeightWorkers
""",
    """
num_workers = 6
num_stages = 6
num_batches = 6


def DistributedDataParallel(w: Work):
    return ComputeAndWeightWorkers(w.batch, w.batch)


assert num_batches == num_workers


reload(parallelsim).simulate(
    num_workers, num_stages, num_batches, DistributedDataParallel
)
""",
    """
def FullyShardedDistributedDataParallel(w: Work):
    return ComputeAndWeightWorkers(w.batch, w.stage % num_workers)


assert num_batches == num_workers


parallelsim.simulate(
    num_workers, num_stages, num_batches, FullyShardedDistributedDataParallel
)
""",
    """
num_stages = 6
num_workers = 6
num_batches = 12


def GPipe(w: Work):
    return ComputeAndWeightWorkers(w.stage, w.stage)


reload(parallelsim)

assert num_stages == num_workers

parallelsim.simulate(
    num_workers,
    num_stages,
    num_batches,
    GPipe,
    parallelsim.OldestStageFirst(num_stages, num_batches),
)
""",
    """
parallelsim.simulate(num_workers, num_stages, num_batches, GPipe)
""",
    """
def CuckooParallelism(work: Work) -> ComputeAndWeightWorkers:
    if (
        work.direction == parallelsim.Direction.BACKWARD
        and work.stage < num_stages // 2 + 2
        and work.batch < num_batches // 2 - 2
    ):
        return ComputeAndWeightWorkers(num_workers - work.stage - 1, work.stage)
    return ComputeAndWeightWorkers(work.stage, work.stage)


parallelsim.simulate(num_workers, num_stages, num_batches, CuckooParallelism)
""",
    """
group_size = 3


def LoopedPipelineParallelism(w: Work):
    def h(x, y):
        return (group_size * y % num_workers) + (x % group_size)

    worker = h(w.stage, w.batch)
    return ComputeAndWeightWorkers(worker, worker)


parallelsim.simulate(num_workers, num_stages, num_batches, LoopedPipelineParallelism)
""",
    """
group_size = 3


def FullyShardedLoopedPipelineParallelism(w: Work):
    def h(x, y):
        return (group_size * y % num_workers) + (x % group_size)

    return ComputeAndWeightWorkers(h(w.stage, w.batch), h(w.stage, w.stage))


parallelsim.simulate(
    num_workers, num_stages, num_batches, FullyShardedLoopedPipelineParallelism
)
""",
]


@pytest.fixture(scope="module")
def diagrams() -> dict[str, Simulation]:
    """The value of the last expression of each cell, which a notebook displays."""
    import ast

    names: dict[str, object] = {}
    shown = []
    for cell in CELLS:
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            shown.append(eval(compile(ast.Expression(last.value), "<cell>", "eval"), names))
    shown = [value for value in shown if isinstance(value, Simulation)]
    return dict(zip(SCHEMES, shown, strict=True))


def as_rows(simulation: Simulation) -> list[str]:
    rows = []
    for worker in range(simulation.num_workers):
        row: list[str] = []
        now = 0
        for _, start, end, stage, batch, direction in (
            cell for cell in simulation.cells if cell.worker == worker
        ):
            row += ["-"] * (start - now) + [f"{'fB'[direction]}{stage}.{batch}"]
            now = end
        rows.append(" ".join(row + ["-"] * (simulation.makespan - now)))
    return rows


@pytest.mark.parametrize("scheme", SCHEMES)
def test_diagram_cell_for_cell(diagrams, scheme):
    golden, simulation = GOLDEN[scheme], diagrams[scheme]
    assert as_rows(simulation) == golden["rows"]
    assert simulation.makespan == golden["makespan"]
    busy = sum(simulation.busy)
    assert simulation.bubble_fraction == 1 - busy / (golden["workers"] * golden["makespan"])
    assert simulation.throughput == golden["batches"] / golden["makespan"]
    assert simulation.weight_transmissions == golden["weight_tx"]
    assert simulation.weight_storage == golden["weight_store"]
    assert simulation.activation_transmissions == golden["act_tx"]
    assert simulation.peak_activations == golden["act_peak"]


def test_diagram_shows_in_a_notebook(diagrams):
    html = diagrams["GPipe default"]._repr_html_()
    assert html.startswith("<svg")
    assert html.count("<title>rank ") >= 2 * 6 * 12
    assert "rank 0: forward, stage 0, microbatch 0; 0 to 1 steps" in html


def test_looped_pipeline_could_take_42_steps_but_takes_46(diagrams):
    looped = diagrams["LoopedPipelineParallelism"]
    assert (looped.lower_bound, looped.makespan) == (42, 46)


def test_cap_on_works_in_flight_makes_gpipe_1f1b(diagrams):
    simulation = simulate(
        6,
        6,
        12,
        lambda work: (work.stage, work.stage),
        BackwardFirst(6, 12),
        max_in_flight=lambda worker: 6 - worker,
    )
    assert simulation.makespan == 51
    assert simulation.peak_activations == [6, 5, 4, 3, 2, 1]

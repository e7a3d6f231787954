"""The scripts of the rungs: their results and times are those of the table, and they are short."""

import ast
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import titanlite.tools.learn.ladder as ladder
from titanlite.tools.learn.ladder.rungs import RUNGS, run_program, run_rung
from titanlite.tools.learn.ladder.scripts import SCRIPTS, main
from titanlite.tools.simulate import Link, Network, SimulationError
from titanlite.tools.simulate.train_step import StepWorkload

RUNG = {rung.name: rung for rung in RUNGS}
NODES = Network(Link(0.03, 0.02), Link(0.004, 0.001), workers_per_node=2)


def train_of(name):
    return import_module(f"titanlite.tools.learn.ladder.{SCRIPTS[name][0]}").train


def test_there_is_a_script_for_each_rung():
    assert [rung for _, rung in SCRIPTS.values()] == [rung.name for rung in RUNGS]


@pytest.mark.parametrize(
    ("workload", "network", "factor"),
    [
        (StepWorkload(), Network(Link(0.05, 0.01)), 1),
        # So little compute that reading the weights takes longer, and twice the last degree.
        (StepWorkload(items=8, compute_units_per_item=1), NODES, 2),
    ],
    ids=["default", "other"],
)
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_takes_the_time_of_its_rung(name, workload, network, factor):
    rung = RUNG[SCRIPTS[name][1]]
    degrees = dict(rung.degrees)
    for axis in list(degrees)[-1:]:
        degrees[axis] *= factor
    rung = replace(rung, degrees=degrees)
    train = train_of(name)
    script, cluster = run_program(
        lambda gpu: train(gpu, rung.grid, workload), rung, workload, network
    )
    table, expected = run_rung(rung, workload, network)
    assert script.seconds == pytest.approx(table.seconds, rel=1e-12)
    assert script.memory_units == pytest.approx(table.memory_units, rel=1e-12)
    assert script.communication_seconds == pytest.approx(table.communication_seconds, rel=1e-9)
    spans = [
        [(s.row, round(s.start, 9), s.kind) for s in each.timeline("").spans]
        for each in (cluster, expected)
    ]
    assert spans[0] == spans[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_short_and_says_what_it_shows(name):
    path = Path(ladder.__file__).with_name(f"{SCRIPTS[name][0]}.py")
    assert path.read_text().count("\n") <= 90
    doc = ast.get_docstring(ast.parse(path.read_text()))
    for word in ("Concept", "Workflow", "Pros", "Cons"):
        assert f"\n{word} " in doc


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_advises_to_run_runs(name, capsys):
    doc = import_module(f"titanlite.tools.learn.ladder.{SCRIPTS[name][0]}").__doc__
    command = next(line for line in doc.splitlines() if line.startswith("Run it: "))
    assert command.split()[4] == name
    assert main([*command.split()[4:], "--columns", "100"]) == 0
    assert SCRIPTS[name][1] in capsys.readouterr().out.splitlines()[-1]


def test_script_draws_every_rank_and_prints_its_cost(capsys, tmp_path):
    svg = tmp_path / "ladder.svg"
    assert main(["2d", "--columns", "100", "--items", "8", "--svg", str(svg)]) == 0
    printed = capsys.readouterr().out
    pipeline, tensor = printed.split("2D DP x TP", maxsplit=1)
    for text, rung in ((pipeline, "2D DP x PP"), (tensor, "2D DP x TP")):
        assert all(f"rank {rank} " in text for rank in range(4))
        last = [line for line in text.splitlines() if line.startswith(rung)][-2]
        assert f"{run_rung(RUNG[rung], StepWorkload(items=8))[0].seconds:.1f}" in last
    assert "of 8 items equal a single process's" in printed
    assert svg.read_text().startswith("<svg")


def test_script_draws_the_messages_that_nothing_hides(capsys):
    """8 of 12.7 s compute, and 4.7 s of the gradients' messages follow."""
    assert main(["1d-overlap", "--columns", "139"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("rank 0"))
    drawn = row.removeprefix("rank 0 ").split()[0]
    assert set(drawn) == {"F", "B", "-"}
    assert drawn.count("-") / len(drawn) == pytest.approx(4.7 / 12.7, abs=0.02)


def test_a_wrong_script_is_refused():
    def train(gpu, grid, workload):
        outcome = train_of("1d")(gpu, grid, workload)
        if gpu.global_rank == 2:
            outcome.gradients["layers.0.attention.query"][0][0] += 1
        return outcome

    rung = RUNG["1D DP, ring"]
    with pytest.raises(SimulationError, match=r"rank 2 has gradients of layers\.0\.attention"):
        run_program(lambda gpu: train(gpu, rung.grid, StepWorkload()), rung, StepWorkload())

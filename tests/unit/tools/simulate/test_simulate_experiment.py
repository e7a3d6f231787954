"""A strategy file as an experiment: what it may define, and how its errors are told."""

import sys

import pytest

from titanlite.cli import main
from titanlite.tools.simulate import Costs, Link, Network, SimulationError, simulate
from titanlite.tools.simulate.schemes import Workload, run_scheme

HEAD = "from titanlite.tools.simulate import *\n"
PIPELINE = HEAD + "def strategy(work):\n    return work.stage, work.stage\n"


@pytest.fixture
def run(tmp_path):
    def run_text(text, name="mine.py", **workload):
        (tmp_path / name).write_text(text)
        return run_scheme(str(tmp_path / name), Workload(**workload))

    return run_text


def test_every_function_may_be_given_the_job(run):
    text = HEAD + (
        "def strategy(work, job):\n"
        "    assert job == (3, 6, 4)\n"
        "    return work.stage % job.workers, work.stage % job.workers\n"
        "def priority(work, job, /):\n    return job.batches - work.batch\n"
        "def max_in_flight(worker, job):\n    return 3 * job.workers - worker - 1\n"
        "def costs(job):\n    return Costs(forward=[1] * job.stages, activation_units=2)\n"
        "def network(job):\n    return Network(Link(job.batches))\n"
    )
    by_hand = simulate(
        3,
        6,
        4,
        lambda work: (work.stage % 3, work.stage % 3),
        lambda work: 4 - work.batch,
        max_in_flight=[8, 7, 6],
        costs=Costs(forward=1, activation_units=2, network=Network(Link(4))),
    )
    assert run(text, workers=3, stages=6, batches=4).cells == by_hand.cells


def test_an_order_and_values_instead_of_functions(run):
    gpipe = PIPELINE + (
        "def order(worker, job):\n"
        "    for direction in (Direction.FORWARD, Direction.BACKWARD):\n"
        "        for batch in range(job.batches):\n"
        "            yield Work(worker, batch, direction)\n"
        "costs = Costs(forward=2, backward=3)\n"
        "network = Network(Link(5))\n"
    )
    simulation = run(gpipe, workers=2, batches=3)
    assert [cell[3:] for cell in simulation.cells[:3]] == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    # A forward, a message, three forwards and backwards, a message, a backward.
    assert simulation.makespan == 2 + 5 + 3 * (2 + 3) + 5 + 3


@pytest.mark.parametrize("priority", ['"oldest-stage"', "OldestStageFirst"])
def test_a_built_in_priority_by_name_or_class(run, priority):
    own = run(PIPELINE + f"priority = {priority}\n", workers=4, batches=6)
    named = run(PIPELINE, workers=4, batches=6, priority="oldest-stage")
    assert own.cells == named.cells != run(PIPELINE, workers=4, batches=6).cells


def test_the_command_s_network_applies_to_the_file_s_costs(run):
    text = PIPELINE + "costs = Costs(forward=2)\n"
    costs = Costs(network=Network(Link(5)))
    assert run(text, workers=2, batches=1, costs=costs).makespan == 2 + 5 + 2 + 2 + 5 + 2


def test_neighbours_are_imported_and_forgotten(tmp_path):
    for number, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "placing.py").write_text(f"def worker():\n    return {number}\n")
        (tmp_path / folder / "mine.py").write_text(
            "import placing\n"
            "def strategy(work):\n"
            "    from placing import worker\n"
            "    return placing.worker(), worker()\n"
        )
    paths = list(sys.path)
    for number, folder in enumerate(("one", "two")):
        simulation = run_scheme(str(tmp_path / folder / "mine.py"), Workload(workers=2))
        assert [cell.worker for cell in simulation.cells[:1]] == [number]
    assert sys.path == paths
    assert "placing" not in sys.modules


def test_a_dataclass_in_the_file(run):
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n" + PIPELINE
    text += "@dataclass\nclass Own:\n    size: int\ncosts = Costs(forward=Own(3).size)\n"
    assert run(text, workers=1, batches=1).makespan == 5


BAD = {
    "raises": ("def strategy(work):\n    return {}[work.stage]\n", "KeyError for f0.0: 0 (", 2),
    "raises in two lines": (
        "def strategy(work):\n    raise ValueError('one\\ntwo')\n",
        "raises ValueError for f0.0: one two",
        2,
    ),
    "exits": ("import sys\ndef strategy(work):\n    sys.exit(0)\n", "calls sys.exit", 3),
    "exits at once": ("raise SystemExit\n", "calls sys.exit", 1),
    "no such module": ("import nowhere_at_all\n", "ModuleNotFoundError: No module", 1),
    "syntax": ("strategy = 3\nwrong =\n", "raises SyntaxError: invalid syntax", 2),
    "order raises": (
        PIPELINE + "def order(worker):\n    yield 1 / 0\n",
        "raises ZeroDivisionError for worker 0",
        5,
    ),
    "priority raises": (
        PIPELINE + "def priority(work):\n    raise RuntimeError('no')\n",
        "raises RuntimeError for f0.0: no",
        5,
    ),
    "costs raise": (PIPELINE + "def costs(job):\n    return job.layers\n", "AttributeError", 5),
    "a cost raises": (
        PIPELINE + "costs = Costs(forward=lambda stage: [1][stage])\n",
        "IndexError",
        4,
    ),
    "no costs": (PIPELINE + "costs = 3\n", "costs is 3; it must be a Costs, or a function", None),
    "no network": (PIPELINE + "def network(): pass\n", "network is None; it must be a N", None),
    "no function": (PIPELINE + "order = [1]\n", "order is [1]; it must be a function", None),
    "other parameters": (
        "def strategy(stage, batch, direction): pass\n",
        "strategy takes (stage, batch, direction); it must take (work) or (work, job)",
        None,
    ),
    "a keyword": ("def strategy(work, *, size): pass\n", "strategy takes (work, size)", None),
    "order and priority": (
        PIPELINE + "def order(worker): pass\npriority = 'backward'\n",
        "leave out priority_order",
        None,
    ),
    "another worker each time": (
        "from itertools import cycle\nworkers = cycle([0, 1, 1])\n"
        "def strategy(work):\n    return next(workers), 0\n",
        "changes its answer when it is called again for f0.0",
        None,
    ),
    "other needs each time": (
        "def strategy(work):\n    return work.stage, 0\nasked = []\n"
        "def needs(work):\n    asked.append(work)\n"
        "    return [asked[0]] if len(asked) == 5 else []\n",
        "needs changes its answer when it is called again for",
        None,
    ),
    "other costs each time": (
        PIPELINE + "asked = []\n"
        "def costs():\n    asked.append(0)\n    return Costs(len(asked), lambda stage: 2)\n",
        "costs changes its answer when it is called again",
        None,
    ),
    "two networks": (
        PIPELINE + "network = Network(Link(1))\ncosts = Costs(network=network)\n",
        "costs has a network; leave out the other one",
        None,
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_line_with_file_and_line(case, tmp_path, capsys):
    text, said, line = BAD[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert main(["simulate", str(path), "--workers", "2"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert line is None or f"(mine.py:{line}: " in error.replace(str(tmp_path) + "/", "")


def test_an_error_in_a_neighbour_names_the_neighbour(tmp_path):
    (tmp_path / "placing.py").write_text("def worker(work):\n    return 1 // work.batch\n")
    (tmp_path / "mine.py").write_text("from placing import worker\nstrategy = worker\n")
    with pytest.raises(SimulationError, match=r"placing.py:2: return 1 // work.batch"):
        run_scheme(str(tmp_path / "mine.py"), Workload())


@pytest.mark.parametrize(
    ("defined", "given", "said"),
    [
        ("order = lambda worker: []", {"split_backward": True}, "order; leave out split_backward"),
        ("priority = 'backward'", {"priority": "oldest-stage"}, "priority; leave out priority"),
        ("max_in_flight = 2", {"max_in_flight": 3}, "max_in_flight; leave out max_in_flight"),
        ("costs = Costs()", {"costs": Costs(forward=2)}, "costs; leave out forward"),
        (
            "costs = Costs()",
            {"costs": Costs(forward=2, weight_units=1, time_unit="s", size_unit="B")},
            "costs; leave out forward, weight_units",
        ),
        ("costs = Costs()", {"costs_per": "model"}, "costs; leave out costs_per"),
        (
            "network = Network(Link(1))",
            {"costs": Costs(network=Network(Link(2)))},
            "network; leave out network",
        ),
    ],
)
def test_what_the_file_defines_is_not_given_twice(run, defined, given, said):
    with pytest.raises(SimulationError, match=f"mine.py defines {said}"):
        run(PIPELINE + defined + "\n", **given)


def test_costs_of_the_whole_model_do_not_grow_with_the_workers():
    costs = Costs(forward=8, backward=16)
    for scheme in ("DDP", "Pipeline", "1F1B", "ZBV"):
        for workers in (2, 4, 8):
            workload = Workload(workers=workers, batches=8, costs=costs, costs_per="model")
            assert sum(run_scheme(scheme, workload).busy) == 8 * 24
    with pytest.raises(SimulationError, match="one value each"):
        run_scheme("DDP", Workload(costs=Costs(forward=[1, 2, 3, 4]), costs_per="model"))

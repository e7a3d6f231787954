"""`titanlite simulate` from the command line."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from titanlite.cli import main
from titanlite.schedule import SCHEDULES, make_schedule, write_csv
from titanlite.simulate.schemes import STRATEGIES


@pytest.mark.parametrize("scheme", [*STRATEGIES, *SCHEDULES])
def test_every_scheme_by_name(scheme, capsys):
    assert main(["simulate", scheme, "--workers", "4", "--batches", "8", "--width", "100"]) == 0
    printed = capsys.readouterr().out
    assert "worker 3" in printed
    assert printed.splitlines()[-1].startswith(scheme)


def test_compare_prints_one_row_each_and_draws_them_all(tmp_path, capsys):
    svg, page, trace, png = (tmp_path / f"out/all.{e}" for e in ("svg", "html", "json", "png"))
    arguments = ["simulate", "1F1B", "--compare", "ZBV", "Pipeline", "--quiet"]
    assert main([*arguments, "--svg", str(svg), "--html", str(page), "--trace", str(trace)]) == 0
    assert main(["simulate", "1F1B", "--quiet", "--png", str(png)]) == 0
    rows = capsys.readouterr().out.splitlines()
    figures = {row.split()[0]: row.split()[2] for row in rows[2:5]}
    assert figures == {"1F1B": "33", "ZBVZeroBubble": "25.5", "Pipeline": "33"}
    assert len(ET.parse(svg).getroot().findall("{http://www.w3.org/2000/svg}svg")) == 3
    assert page.read_text().count("<figure>") == 3
    assert "<td>ZBVZeroBubble</td>" in page.read_text()
    traces = sorted(path.name for path in trace.parent.glob("*.json"))
    assert traces == ["all_1F1B.json", "all_Pipeline.json", "all_ZBVZeroBubble.json"]
    assert json.loads((trace.parent / traces[0]).read_text())["traceEvents"]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_compared_schemes_have_the_same_model(capsys):
    main(["simulate", "DDP", "--compare", "GPipe", "ZBV", "--batches", "4", "--quiet"])
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[2:5]]
    busy = [float(row[2]) * (1 - float(row[4].rstrip("%")) / 100) for row in rows]
    assert busy == pytest.approx([12, 12, 12], rel=2e-3)


def test_costs_and_network(capsys):
    arguments = "simulate GPipe --workers 2 --batches 3 --quiet --forward 2 --backward 3"
    network = "--latency 0.5 --time-per-unit 0.25 --activation-units 2"
    main([*arguments.split(), *network.split()])
    row = capsys.readouterr().out.splitlines()[2].split()
    # First forward, a message, three F and B on the last worker, a message, the last backward.
    assert float(row[2]) == 2 + 1 + 3 * (2 + 3) + 1 + 3


def test_order_of_a_strategy(capsys):
    arguments = "simulate Pipeline --workers 4 --batches 8 --quiet --priority backward"
    main([*arguments.split(), "--max-in-flight", "4", "3", "2", "1"])
    assert capsys.readouterr().out.splitlines()[2].split()[6] == "4"


def test_own_strategy_from_a_file(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from titanlite.simulate import ComputeAndWeightWorkers\n"
        "def strategy(work):\n    return ComputeAndWeightWorkers(0, work.stage)\n"
        "def other(work):\n    return ComputeAndWeightWorkers(1, 1)\n"
    )
    assert main(["simulate", str(path), "--workers", "2", "--batches", "2", "--quiet"]) == 0
    assert main(["simulate", f"{path}:other", "--workers", "2", "--batches", "2", "--quiet"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "mine.py" in line]
    assert [row[2] for row in rows] == ["12", "12"]
    assert [row[8] for row in rows] == ["4", "0"]


def test_schedule_from_a_csv(tmp_path, capsys):
    path = tmp_path / "table.csv"
    write_csv(make_schedule("ZB-H1", 4, 8), path)
    assert main(["simulate", str(path), "--quiet"]) == 0
    assert main(["simulate", "ZB-H1", "--quiet"]) == 0
    rows = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    assert rows[2] == rows[5]


def test_ladder_prints_its_table(tmp_path, capsys):
    svg = tmp_path / "ladder.svg"
    assert main(["simulate", "ladder", "--svg", str(svg), "--workers-per-node", "4"]) == 0
    printed = capsys.readouterr().out
    for name in ("0D", "1D DP, ring", "2D DP x TP", "3D DP x PP x TP", "4D with CP", "4D with EP"):
        assert f"\n{name}" in printed
    assert "gain" in printed
    assert ET.parse(svg).getroot().get("width")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("simulate", "no scheme given; name one, or `ladder`"),
        ("simulate 1F1", "there is no scheme '1F1'; did you mean 1F1B"),
        ("simulate Looped", "did you mean LoopedBFS or LoopedPipeline"),
        ("simulate Cuckoo --workers 3 --stages 6", "Cuckoo puts f3.0 on compute worker 3"),
        ("simulate LoopedPipeline --workers 5 --group-size 2", "does not divide 5 workers"),
        ("simulate 1F1B --workers 0", "number of ranks is 0"),
        ("simulate 1F1B --stages 6", "6 stages do not divide evenly over 4 workers"),
        ("simulate 1F1B --stages 8", "needs 1 stages per rank, not 2"),
        ("simulate 1F1B --priority backward", "which apply only to strategies"),
        ("simulate none.py", "there is no such file"),
        ("simulate none.csv", "cannot be read"),
        ("simulate DDP --forward -1", "must not be negative"),
        ("simulate ZBV --forward 1 2 3 4 5 6 7 8", "set stages"),
        ("simulate Pipeline --max-in-flight 1 1", "2 values for 4 workers"),
        ("simulate Pipeline --workers 100000000", "would take about 57 minutes and 136 GiB"),
        (
            "simulate 1F1B --workers 100000000",
            "1,600,000,000 work items, which would take about 110 minutes",
        ),
        ("simulate DDP --workers 2 --batches 1000000000000000", "would take about 254 years"),
        ("fly", "no command 'fly'"),
    ],
)
def test_mistakes_get_one_line(arguments, said, capsys):
    assert main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_broken_strategy_file_gets_one_line(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("strategy = 3\nwrong =\n")
    assert main(["simulate", str(path)]) == 2
    assert "broken.py: raises SyntaxError" in capsys.readouterr().err
    path.write_text("strategy = 3\n")
    assert main(["simulate", str(path)]) == 2
    assert "there is no function 'strategy'" in capsys.readouterr().err


def test_help_lists_commands_and_schemes(capsys):
    assert main(["--help"]) == 0
    assert "simulate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(scheme in printed for scheme in ("LoopedPipeline", "DualPipeV", "ladder"))


def test_module_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from titanlite.cli import main\n"
        "sys.exit(main(['simulate', 'ZBV', '--quiet']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("scheme")

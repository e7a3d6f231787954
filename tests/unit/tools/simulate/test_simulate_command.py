"""`titanlite simulate` from the command line."""

import csv
import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from titanlite.cli import main
from titanlite.schedule import SCHEDULES, make_schedule, write_csv
from titanlite.tools.simulate.schemes import STRATEGIES


@pytest.mark.parametrize("scheme", [*STRATEGIES, *SCHEDULES])
def test_every_scheme_by_name(scheme, capsys):
    assert main(["simulate", scheme, "--workers", "4", "--batches", "8", "--width", "100"]) == 0
    printed = capsys.readouterr().out
    assert "rank 3" in printed
    assert printed.splitlines()[-1].startswith(scheme)


def test_a_cell_shows_its_stage_or_its_batch(capsys):
    scheme = ["simulate", "1F1B", "--workers", "2", "--batches", "3", "--width", "50", "--no-color"]
    for label, cells in {
        "stage": "..f1b1--f1b1--f1b1--....",
        "batch": "..f0b0--f1b1--f2b2--....",
    }.items():
        assert main([*scheme, "--label", label]) == 0
        assert f"rank 1 {cells} " in capsys.readouterr().out


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


def test_an_option_that_one_of_the_schemes_uses_is_no_mistake(capsys):
    arguments = "simulate LoopedPipeline --compare DDP FSDP --quiet --group-size 4"
    network = "--latency 1 --weight-units 2 --prefetch 2"
    assert main([*arguments.split(), *network.split()]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3


def test_a_fraction_as_a_cost(capsys):
    assert main(["simulate", "DDP", "--quiet", "--forward", "1/3", "--backward", "2/3"]) == 0
    # Two batches on each worker, through four stages.
    assert capsys.readouterr().out.splitlines()[2].split()[2] == "8"


def test_figures_as_csv(tmp_path):
    path = tmp_path / "out.csv"
    assert main(["simulate", "1F1B", "--compare", "ZBV", "--quiet", "--csv", str(path)]) == 0
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["scheme"] for row in rows] == ["1F1B", "ZBVZeroBubble"]
    assert [float(row["makespan"]) for row in rows] == [33, 25.5]
    assert float(rows[0]["bubble"]) == pytest.approx(1 - 24 / 33, rel=1e-15)


def test_own_strategy_from_a_file(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from titanlite.tools.simulate import ComputeAndWeightWorkers\n"
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
    assert main(["simulate", str(path), "--quiet", "--workers", "4", "--batches", "8"]) == 0
    assert main(["simulate", str(path), "--quiet", "--workers", "8"]) == 2
    assert "has 4 workers, not 8" in capsys.readouterr().err


def test_ladder_prints_its_table(tmp_path, capsys):
    svg = tmp_path / "ladder.svg"
    assert main(["simulate", "ladder", "--svg", str(svg), "--workers-per-node", "4"]) == 0
    printed = capsys.readouterr().out
    for name in ("0D", "1D DP, ring", "2D DP x TP", "3D DP x PP x TP", "4D with CP", "4D with EP"):
        assert f"\n{name}" in printed
    assert "gain" in printed
    assert ET.parse(svg).getroot().get("width")


def test_ladder_goes_up_to_the_degrees_given(capsys):
    options = {"tp": "8", "dp": "2", "items": "4", "layers": "2"}
    given = [text for name, value in options.items() for text in (f"--{name}", value)]
    assert main(["simulate", "ladder", *given, "--quiet"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("dimensions")
    assert [row.split("  ")[0] for row in rows[:3]] == ["0D", "1D DP 2", "2D DP 2 x TP 8"]


def test_ladder_is_slower_on_slower_links(capsys):
    seconds = []
    for time in ("0.01", "1/50"):
        assert main(["simulate", "ladder", "--dp", "4", "--time-per-unit", time, "--quiet"]) == 0
        seconds.append(float(capsys.readouterr().out.splitlines()[3].split()[4]))
    # 6 steps of 125 units, each 0.01 s longer a unit.
    assert seconds[1] - seconds[0] == pytest.approx(7.5)


def test_ladder_without_any_cost_takes_no_time(capsys):
    units = "compute-units-per-item gradient-units activation-units key-value-units latency"
    options = [text for name in units.split() for text in (f"--{name}", "0")]
    assert main(["simulate", "ladder", "--dp", "2", "--overlap", *options]) == 0
    assert "1 more rank\n" in capsys.readouterr().out


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
        ("simulate DDP --forward inf", "--forward: inf is not a number up to 1e+100"),
        ("simulate DDP --forward 1e308", "--forward: 1e308 is not a number up to 1e+100"),
        ("simulate DDP --latency nan", "--latency: nan is not a number"),
        ("simulate DDP --backward 1/0", "--backward: '1/0' is not a number"),
        ("simulate DDP --workers 2.5", "--workers: '2.5' is not a whole number"),
        ("simulate DDP --workers", "--workers: expected one argument"),
        ("simulate DDP --speed 3", "--speed: there is no such option; see --help"),
        (
            "simulate DDP --priority fast",
            "--priority: there is no 'fast'; choose from oldest-batch",
        ),
        ("simulate DDP --width 3", "--width: 3 is too narrow; give at least 30"),
        ("simulate DDP --quiet --width 80", "--width: --quiet draws no picture"),
        ("simulate DDP --svg out.png", "--svg: the name 'out.png' must end in .svg"),
        ("simulate DDP --png picture", "--png: the name 'picture' must end in .png"),
        ("simulate DDP --html /proc/no/a.html", "a.html: cannot be written"),
        ("simulate DDP --csv /dev/null/a.csv", '--csv: "/dev/null/a.csv" cannot be written'),
        # Options that no scheme of the run uses.
        ("simulate DDP --group-size 2", "--group-size: has no effect on DDP: only LoopedPipeline"),
        ("simulate DDP --latency 1", "--latency: has no effect on DDP: nothing is sent"),
        ("simulate FSDP --bandwidth 2", "--bandwidth: has no effect on FSDP: nothing is sent that"),
        ("simulate FSDP --weight-units 2 --no-fetch-contention", "no weights are fetched that"),
        ("simulate FSDP --memory m.png", "--memory: nothing has a size; give --weight-units"),
        ("simulate FSDP --memory m.html", "--memory: the name 'm.html' must end in .png or .svg"),
        # Units.
        ("simulate DDP --forward 1ms", "--backward: 2 has no unit, but --forward 1ms has one"),
        ("simulate DDP --latency 1us --forward 1 --backward 2", "--forward: 1 has no unit"),
        ("simulate DDP --weight-units 1MB 2 3 4", "--weight-units: 2 has no unit, but --weight"),
        ("simulate DDP --weight-units 1MB --kept-units 2", "--kept-units: 2 has no unit"),
        ("simulate DDP --forward 1h", "--forward: '1h': the unit must be one of s, ms, us, ns"),
        ("simulate DDP --weight-units 1s", "the unit must be one of B, KB, MB"),
        ("simulate DDP --bandwidth 0", "--bandwidth: 0 must be above 0"),
        ("simulate DDP --bandwidth 1GB", "the unit must be one of B/s, KB/s"),
        ("simulate DDP --bandwidth 1 --time-per-unit 1", "--time-per-unit says the same"),
        ("simulate 1F1B --latency 1 --prefetch 3", "--prefetch: has no effect on 1F1B"),
        ("simulate 1F1B --time-per-unit 2", "nothing is sent that has a size"),
        ("simulate 1F1B --weight-gradient 1", "no backward pass is split"),
        ("simulate 1F1B --no-overlap", "--no-overlap: has no effect on 1F1B: nothing is sent"),
        ("simulate 1F1B --latency 1 --workers-per-node 2", "--workers-per-node: has no effect"),
        ("simulate 1F1B --inside-latency 1", "no two workers are in one node"),
        ("simulate 1F1B --reduce-gradients", "--reduce-gradients: has no effect on 1F1B"),
        ("simulate Pipeline --workers 100000000", "would take about 57 minutes and 136 GiB"),
        (
            "simulate 1F1B --workers 100000000",
            "1,600,000,000 work items, which would take about 110 minutes",
        ),
        ("simulate DDP --workers 2 --batches 1000000000000000", "would take about 254 years"),
        ("fly", "no command 'fly'"),
        # The ladder.
        ("simulate ladder --dp 3", "16 items do not divide evenly over dp x ep = 3"),
        ("simulate ladder --pp 0", "--pp: 0 is less than 1"),
        ("simulate ladder --tp two", "--tp: 'two' is not a whole number"),
        ("simulate ladder --layers 2.5", "--layers: '2.5' is not a whole number"),
        ("simulate ladder --gradient-units nan", "--gradient-units: nan is not a number"),
        ("simulate ladder --gradient-units -3", "gradient_units is -3; it must not be negative"),
        ("simulate ladder --latency -1", "latency_seconds is -1; it must not be negative"),
        (
            "simulate ladder --inside-speedup 0 --workers-per-node 2",
            "--inside-speedup: 0 must be above 0",
        ),
        (
            "simulate ladder --inside-speedup 2",
            "--inside-speedup: needs nodes; give --workers-per-node",
        ),
        (
            "simulate ladder --dp 4096 --items 4096",
            "4096 ranks; the ladder runs a thread for each rank",
        ),
        (
            "simulate ladder --items 100000000",
            "multiplications of integers; the ladder runs at most 1.0e+09",
        ),
        ("simulate ladder --dp 2 --microbatch 3", "16 items of a rank do not divide evenly"),
        ("simulate ladder --png picture.png", "--png: there is no such option"),
        ("simulate ladder --svg picture.txt", "--svg: the name 'picture.txt' must end in .svg"),
        # Sweeps.
        ("simulate 1F1B --sweep workers=4 --html x.html", "--html: a sweep draws no timelines"),
        ("simulate 1F1B --sweep workers=4 --workers 4", "--workers: --sweep gives its values"),
        (
            "simulate 1F1B --sweep workers=0,-1",
            "none of 2 points can run: 1F1B: the number of ranks is",
        ),
        ("simulate 1F1 --sweep workers=2", "none of 1 points can run: there is no scheme '1F1'"),
        ("simulate Pipeline --sweep priority=fast", "there is no 'fast'; choose from oldest-batch"),
        ("simulate Pipeline --sweep group-size=2", "--group-size: has no effect on Pipeline"),
        ("simulate Pipeline --sweep latency=0,1 --prefetch 2", "--prefetch: has no effect"),
        ("simulate DDP --sweep ladder=1", "'ladder=1' is no axis"),
    ],
)
def test_mistakes_get_one_line(arguments, said, capsys):
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_broken_strategy_file_gets_one_line(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("strategy = 3\nwrong =\n")
    assert main(["simulate", str(path)]) == 2
    assert "broken.py: raises SyntaxError" in capsys.readouterr().err
    path.write_text("strategy = 3\n")
    assert main(["simulate", str(path)]) == 2
    assert "there is no function 'strategy'" in capsys.readouterr().err


def test_module_runs_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from titanlite.cli import main\n"
        "sys.exit(main(['simulate', 'ZBV', '--quiet']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("scheme")

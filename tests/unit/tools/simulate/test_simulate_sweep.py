"""`titanlite simulate --sweep`: the grid, its table, CSV, picture and fronts."""

import csv
import itertools
import xml.etree.ElementTree as ET

import pytest

from titanlite.cli import main
from titanlite.tools.figures.sweep import SweptPoint, save_sweep
from titanlite.tools.simulate import Costs
from titanlite.tools.simulate.figures import Row
from titanlite.tools.simulate.options import number, read_size, whole
from titanlite.tools.simulate.sweep import mark_fronts, pareto_front, read_axes, run_sweep
from titanlite.tools.simulate.work import SimulationError

READERS = {"workers": whole, "batches": whole, "forward": number, "weight_units": read_size}


def test_axes_are_values_and_ranges_with_their_end():
    axes = read_axes(["workers=4,8,16", "batches=8:64:8,100", "forward=0.1:0.4:0.1"], READERS.get)
    assert axes == {
        "workers": [4, 8, 16],
        "batches": [*range(8, 65, 8), 100],
        "forward": [0.1, 0.2, 0.3, 0.4],
    }
    sizes = read_axes(["weight_units=1.5GiB:2.5GiB:0.5GiB,1MiB:2MiB"], READERS.get)
    assert " ".join(map(str, sizes["weight_units"])) == "1.5GiB 2GiB 2.5GiB 1MiB 2MiB"
    assert [size.value // 2**20 for size in sizes["weight_units"]] == [1536, 2048, 2560, 1, 2]
    assert read_axes(["workers=2:4"], READERS.get) == {"workers": [2, 3, 4]}
    assert read_axes(["batches=8:20:8,8"], READERS.get) == {"batches": [8, 16]}


@pytest.mark.parametrize(
    ("axis", "said"),
    [
        ("workers", "is no axis; give OPTION=VALUES"),
        ("color=3", "is no axis"),
        ("workers=", "'' is not a whole number"),
        ("workers=4,x", "workers: 'x' is not a whole number"),
        ("workers=8:4", "'8:4' is no range"),
        ("workers=4:8:0", "with a STEP above 0"),
        ("workers=4:8:1:1", "'4:8:1:1' is no range"),
        ("workers=1:9000000", "more than 100,000 values"),
        ("workers=1:1000 batches=1:1000", "1,000,000 points are too many"),
        ("workers=4 workers=8", "workers is given twice"),
        ("forward=nan", "nan is not a number"),
        ("weight_units=1MiB:2GiB", "all in one unit"),
        ("weight_units=1MiB:2", "all in one unit"),
    ],
)
def test_wrong_axes_are_named(axis, said):
    with pytest.raises(SimulationError) as error:
        read_axes(axis.split(), READERS.get)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_front_has_what_no_other_point_beats():
    pairs = [*itertools.product((1, 2, 3), (3, 2, 5)), (1, 2), (0, 9), (4, 1), (5, 1)]
    found = {pair for pair, is_best in zip(pairs, pareto_front(pairs), strict=True) if is_best}
    by_definition = {
        (x, y)
        for x, y in pairs
        if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in pairs)
    }
    assert found == by_definition == {(0, 9), (1, 2), (4, 1)}
    assert pareto_front(pairs).count(True) == 4  # (1, 2) twice


def test_makespans_are_compared_within_a_job():
    rows = [
        {"workers": w, "batches": b, "makespan": m, "bubble": 0, "peak held": 1}
        for w, b, m in ((2, 8, 10), (4, 8, 10), (4, 8, 6), (4, 16, 30))
    ]
    fronts = mark_fronts(rows, ("workers", "batches"), "peak held")
    assert fronts.workers == [True, False, True, True]
    assert mark_fronts(rows, ("workers",), "peak held").workers == [True, False, True, False]


def test_grid_by_the_command(tmp_path, capsys):
    table, svg, png = (tmp_path / f"out/sweep.{end}" for end in ("csv", "svg", "png"))
    arguments = "simulate 1F1B --compare ZB-H1 --sweep workers=2,4 batches=4:8:2 --forward 2"
    files = ["--csv", str(table), "--svg", str(svg), "--png", str(png)]
    assert main([*arguments.split(), "--costs-per", "model", *files]) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    where = [(row["workers"], row["batches"], row["scheme"]) for row in rows]
    assert where == list(itertools.product("24", "468", ("1F1B", "ZB-H1")))
    for row in rows:
        workers, batches = int(row["workers"]), int(row["batches"])
        if row["scheme"] == "1F1B":
            assert float(row["makespan"]) == 4 / workers * (batches + workers - 1)
    printed = capsys.readouterr().out.splitlines()
    marks = [line.split()[-1].strip("0123456789") for line in printed[2 : 2 + len(rows)]]
    expected = [
        "*" * int(row["on_memory_front"]) + "+" * int(row["on_workers_front"]) for row in rows
    ]
    assert marks == expected
    assert "".join(marks).count("+") == 6
    assert ET.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    text = svg.read_text()
    assert all(word in text for word in ("bubble", "workers", "ZB-H1", "on the Pareto front"))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_sizes_with_units_are_swept(capsys):
    arguments = "simulate FSDP --forward 1ms --backward 2ms --latency 1us --bandwidth 10GB/s"
    assert main([*arguments.split(), "--sweep", "weight-units=1MB,20MB", "workers=2,4"]) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert "peak memory" in header
    found = {tuple(row.split()[i] for i in (3, 1)): row for row in rows[:4]}
    assert list(found) == [("1MB", "2"), ("1MB", "4"), ("20MB", "2"), ("20MB", "4")]
    # Each worker stores one stage and keeps the gradients of all four, while it has one or two
    # stages fetched.
    assert " 6.68 MiB " in found["1MB", "4"]
    assert "with as little memory (peak memory)" in rows[4]


def test_points_that_cannot_run_are_told(capsys):
    assert main(["simulate", "LoopedPipeline", "--sweep", "group-size=1:4"]) == 0
    printed = capsys.readouterr().out
    assert "LoopedPipeline with group_size=3 cannot run: the group size 3 does not" in printed
    assert len([line for line in printed.splitlines() if line.startswith("LoopedPip")]) == 4


STOPPED = """
def strategy(work, job):
    if job.batches == 3:
        raise KeyboardInterrupt
    return work.stage, work.stage
"""


def test_ctrl_c_keeps_what_has_run(tmp_path, capsys):
    path, table = tmp_path / "mine.py", tmp_path / "found.csv"
    path.write_text(STOPPED)
    assert main(["simulate", str(path), "--sweep", "batches=1:9", "--csv", str(table)]) == 130
    assert [row["batches"] for row in csv.DictReader(table.read_text().splitlines())] == ["1", "2"]
    assert "interrupted: 2 of 9 points have run" in capsys.readouterr().out
    assert main(["simulate", str(path), "--sweep", "batches=3:9"]) == 2
    assert "interrupted before a point had run" in capsys.readouterr().err


def test_progress_prints_after_each_point():
    done = []

    def run(scheme, point):
        if point["workers"] == 2:
            raise SimulationError("not two")
        return Row({"scheme": scheme, **point}, Costs())

    axes = {"workers": [1, 2, 3]}
    swept = run_sweep(["a", "b"], axes, run, lambda swept: done.append(swept.num_done))
    assert done == [1, 2, 3, 4, 5, 6]
    assert swept.is_complete
    assert swept.failed == {"not two": 2}
    assert swept.first_failed == {"not two": "a with workers=2"}


def test_equal_sweeps_give_equal_pictures(tmp_path):
    points = [
        SweptPoint("a", f"batches {b}", f"w{w}", w, 10 / w + b, w * b, 1 / b, b == 8, w == 1)
        for w in (1, 2)
        for b in (4, 8)
    ]
    for name in ("one.svg", "two.svg"):
        labels = {"x_label": "workers", "memory_label": "held", "time_label": "makespan"}
        save_sweep(tmp_path / name, points, title="costs $1 and $2", **labels)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()

"""Every exercise: its skeleton is not written yet, its solution is right, wrong answers are named.

A wrong answer is the worked solution with one typical mistake, given as the text that it replaces.
"""

import json
import linecache
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanlite.cli import main as titanlite
from titanlite.tools.lab import Mesh, VirtualCluster
from titanlite.tools.lab.exercises import EXERCISES
from titanlite.tools.lab.exercises.exercise import load_exercise
from titanlite.tools.lab.exercises.judge import judge

# Exercise: (text of the solution, text of the mistake, kind of the verdict, what its text has).
WRONG = {
    "shift": [
        (
            ".isend(tensor)\n",
            ".send(tensor)\n",
            "deadlock",
            "0 -> 1 -> 2 -> 3 -> 0: .* send with isend",
        ),
        (
            "torch.empty_like(tensor)",
            "torch.empty(5, dtype=tensor.dtype)",
            "size",
            "for 40 bytes .* which sent 32",
        ),
    ],
    "prefix_sum": [
        ("total = tensor.clone()", "total = tensor", "changed", "rank 1 changes its arg"),
        (
            ".send(total)",
            ".send(tensor)",
            "value",
            r"rank 2 returns .* is in step 1: rank 1 sends b to rank 2; in the worked solution, it "
            r"sends a\+b to rank 2",
        ),
    ],
    "tree_broadcast": [
        (
            "    have = 1\n",
            """    if device.rank > 0:
        return device.channel(0).recv(torch.empty_like(tensor))
    have = device.mesh.size
    for peer in range(1, have):
        device.channel(peer).send(tensor)
""",
            "steps",
            "takes 7 steps; 3 are enough",
        ),
        ("have = 1\n", "return device.broadcast(tensor)\n", "forbidden", "calls broadcast"),
    ],
    "ring_all_gather": [
        ("- step)", "+ step)", "value", "rank 0 returns, as value 1, "),
        (
            "range(1, group.size)",
            "range(1, group.size + 1)",
            "messages",
            "16 messages; 12 are enough",
        ),
    ],
    "ring_all_reduce": [
        (
            "parts[mine] = parts[mine] + received",
            "parts[mine] = received",
            "value",
            r"first difference is in step 1: rank 0 sends d3 to rank 1; .* sends a3\+d3",
        ),
        (
            "(group.rank + 1 - step)",
            "(group.rank - step)",
            "value",
            "first difference is in step 3",
        ),
    ],
    "bus_bandwidth": [
        ("2 if kind", "1 if kind", "value", "rank 0 returns 1572864.0, not 3145728.0"),
        ("kind ==", "kynd ==", "error", r"NameError: .*kynd.* \(at answer.py:\d+\)"),
    ],
    "average_gradients": [
        (".view(gradient.shape)", "", "value", r"shape \(6,\), not \(2, 3\)"),
        (
            "bucket = torch.cat([gradient.flatten() for gradient in gradients])",
            "return [device.all_reduce(g) / device.mesh.size for g in gradients]",
            "messages",
            "sends 72 messages; 24 are enough",
        ),
    ],
    "uneven_batches": [
        ("gradient * num_rows", "gradient", "value", "rank 0 returns"),
        (
            "torch.cat([gradient * num_rows, torch.tensor([float(num_rows)])])",
            "torch.cat([gradient.repeat(num_rows), torch.tensor([float(num_rows)])])",
            "collectives",
            "the shape must be the same",
        ),
    ],
    "row_parallel": [
        ("device.all_reduce(x @ weight)", "x @ weight", "value", "rank 0 sends nothing"),
        (
            "device.all_reduce(x @ weight)",
            "device.all_gather(x, dim=1) @ device.all_gather(weight)",
            "bytes",
            "sends 2112 bytes; 1440 are enough",
        ),
    ],
    "column_backward": [
        ("x.T @ dy]", "device.all_reduce(x.T @ dy)]", "value", "as value 1, "),
        ("[device.all_reduce(dy @ weight.T), x.T @ dy]", "dy @ weight.T", "value", "not 2 values"),
    ],
    "pipeline_forward": [
        (
            "device.channel(device.rank - 1).recv(",
            "(",
            "deadlock",
            "rank 0: waits .* until its 16 bytes .* are received by rank 1, which waits",
        ),
        (
            "for micro_batch in micro_batches:\n",
            "device.barrier()\n    for micro_batch in micro_batches:\n",
            "messages",
            "9 are enough",
        ),
    ],
    "one_f_one_b": [
        ("min(device.mesh.size - 1 - device.rank, num_micro_batches)", "0", "value", "rank 0"),
        ("device.mesh.size - 1 - device.rank", "device.rank", "value", "value 1, 'B0', not 'F1'"),
    ],
    "zero_step": [
        (
            "device.reduce_scatter(gradient) / device.mesh.size",
            "device.all_reduce(gradient).chunk(4)[device.rank] / 4",
            "forbidden",
            "calls all_reduce",
        ),
        ("shard - lr * mean)", "mean)", "value", "first difference is in step 3"),
    ],
    "gradient_norm": [
        (', ["tp"])', ")", "value", "rank 0 returns 13.9"),
        (".sqrt().item()", ".sqrt()", "value", r"rank 0 returns 13.0, not 13.0|tensor"),
    ],
    "rows_to_columns": [
        ("torch.cat(received)", "torch.cat(received, 1)", "value", r"\(1, 8\), not \(4, 2\)"),
        (
            "group = device.group()",
            "return device.all_gather(rows).chunk(4, 1)[device.rank]",
            "bytes",
            "384 bytes; 96 are enough",
        ),
    ],
    "backward_cycle": [
        ("last_forward + 1 +", "last_forward +", "value", "rank 0 returns 9, not 10"),
        ("+ run\n", "- run\n", "value", "rank 0 returns 8, not 10"),
    ],
    "buckets_in_order": [
        (
            "while len(sums) in full:\n            sums.append(device.all_reduce(full[len(sums)]))",
            "sums.append(device.all_reduce(bucket))",
            "value",
            "rank 0 returns, as value 0, ",
        ),
        (
            "while len(sums) in full",
            "if len(sums) in full",
            "deadlock",
            r"waits in all_reduce 3 .* from rank \d, which has ended",
        ),
    ],
    "ring_attention": [
        ("torch.logaddexp(lse, block)", "torch.maximum(lse, block)", "value", "rank 0 returns"),
        ("if step > 0:", "if True:", "messages", "16 messages; 12 are enough"),
    ],
    "headtail_positions": [
        ("2 * world_size - 1 - rank", "2 * rank + 1", "value", "rank 0 returns"),
        ("2 * world_size - 1 - rank", "world_size + rank", "value", "rank 0 returns"),
    ],
    "uneven_all_to_all": [
        ("= device.all_to_all(counts)", "= counts", "size", "for .* bytes .* which sent"),
        (
            "irecv(incoming[peer], peer) for",
            "recv(incoming[peer], peer) for",
            "deadlock",
            "one of them must send before it receives",
        ),
    ],
}


@pytest.fixture(scope="module")
def pool():
    with VirtualCluster(Mesh(rank=8), algorithm="ring") as cluster:
        yield cluster


def answer(name, text):
    # With its lines known, as those of a file.
    linecache.cache["answer.py"] = (len(text), None, text.splitlines(True), "answer.py")
    namespace = {"__name__": "answer"}
    exec(compile(text, "answer.py", "exec"), namespace)
    return namespace[name]


def test_there_are_fifteen_on_all_notes_with_two_wrong_answers_each():
    assert len(EXERCISES) >= 15
    assert {note for note, _ in EXERCISES.values()} >= set(range(1, 11))
    assert all(len(WRONG[name]) == 2 for name in EXERCISES)


@pytest.mark.parametrize("name", EXERCISES)
def test_its_note_names_it(name):
    number, _ = EXERCISES[name]
    (note,) = (Path(__file__).parents[2] / "docs" / "lab").glob(f"{number}-*.md")
    assert re.search(rf"^\*\*Exercises?:\*\* `.*\b{name}`", note.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_fails_helpfully_and_the_solution_passes(pool, name):
    exercise = load_exercise(name)
    assert exercise.name == name
    assert exercise.hint
    verdict = judge(pool, exercise, answer(name, exercise.skeleton))
    assert verdict.kind == "unwritten"
    assert f"{name} is not written yet; `titanlite lab exercise {name} --hint`" in verdict.lines[0]
    verdict = judge(pool, exercise, answer(name, exercise.solution_text))
    assert verdict.is_passed, verdict.lines


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in EXERCISES for number in range(2)]
)
def test_a_typical_mistake_is_named(pool, name, number):
    right, wrong, kind, pattern = WRONG[name][number]
    exercise = load_exercise(name)
    assert right in exercise.solution_text
    text = exercise.solution_text.replace(right, wrong, 1)
    verdict = judge(pool, exercise, answer(name, text))
    found = " ".join(verdict.lines)
    assert verdict.kind == kind, found
    assert re.search(pattern, found), found


class TestCommand:
    def test_the_list_has_all_and_loads_no_torch(self):
        code = (
            "import sys; from titanlite.cli import main; "
            "main(['lab', 'exercise']); print('torch' in sys.modules)"
        )
        run = [sys.executable, "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
        words = " ".join(done.stdout.split())
        for name, (note, summary) in EXERCISES.items():
            assert f"{name} note {note}: {summary}" in words
        assert done.stdout.endswith("False\n")

    def test_from_the_skeleton_to_a_judged_answer_with_its_picture(self, tmp_path, capsys):
        path, picture = tmp_path / "mine.py", tmp_path / "mine.svg"
        command = ["lab", "exercise", "shift", str(path)]
        assert titanlite([*command, "--start"]) == 0
        assert titanlite([*command, "--start"]) == 2
        assert "exists already" in capsys.readouterr().err
        assert path.read_text() == load_exercise("shift").skeleton
        text = load_exercise("shift").solution_text
        path.write_text(text.replace("(device.rank + 1)", "(device.rank + 2)"))
        assert titanlite([*command, "--picture", str(picture)]) == 1
        out = capsys.readouterr().out
        assert re.search(
            r"shift: not yet: deadlock\n  rank \d: .*waits at mine.py:\d+ for 32 ", out
        )
        assert "the first difference is in step 0: rank 0 sends a to rank 2; in the worked" in out
        assert picture.read_text().count("<circle") == 4
        path.write_text(text)
        page = tmp_path / "mine.html"
        assert titanlite([*command, "--picture", str(page)]) == 0
        assert "rank 0 to rank 1: " in page.read_text()
        assert "right on all 4 ranks: 4 messages, 128 bytes, 1 steps" in capsys.readouterr().out

    def test_hint_and_solution_are_shown(self, capsys):
        assert titanlite(["lab", "exercise", "shift", "--hint"]) == 0
        assert titanlite(["lab", "exercise", "shift", "--solution"]) == 0
        exercise = load_exercise("shift")
        assert capsys.readouterr().out == f"{exercise.hint}\n{exercise.solution_text}"

    def test_all_answers_of_a_folder_are_judged_with_their_points(self, tmp_path, capsys):
        for name in EXERCISES:
            (tmp_path / f"{name}.py").write_text(load_exercise(name).solution_text)
        (tmp_path / "shift.py").unlink()
        (tmp_path / "prefix_sum.py").write_text("raise SystemExit(3)")
        assert (
            titanlite(["lab", "exercise", "all", str(tmp_path), f"--json={tmp_path}/points.json"])
            == 1
        )
        rows = json.loads((tmp_path / "points.json").read_text())
        assert [row["name"] for row in rows] == list(EXERCISES)
        assert sum(row["points"] for row in rows) == 52
        assert {each["name"] for each in rows if not each["passed"]} == {"shift", "prefix_sum"}
        assert "prefix_sum.py:1: SystemExit: 3" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["all"], "exercise: all takes a folder"),
            (["shfit"], "exercise: there is no 'shfit'; did you mean shift"),
            (["shift"], "exercise: name the file of your function"),
            (["--hint"], "exercise: name one"),
            (["shift", "none.py"], "none.py: there is no such file; .* --start"),
            (["shift", "broken.py"], r"broken.py:2: SyntaxError"),
            (["shift", "raises.py"], r"raises.py:1: ZeroDivisionError"),
            (["shift", "empty.py"], r"empty.py: has no function shift; define shift\(device"),
            (
                ["shift", "empty.py", "--picture", "a.png"],
                "--picture: a.png must end in .svg or .html",
            ),
            (["shift", "no/a.py", "--start"], "no/a.py: cannot be written: No such file"),
        ],
    )
    def test_misuse_is_one_line(self, arguments, message, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        for name, text in {"broken": "\n(", "raises": "1 / 0", "empty": ""}.items():
            (tmp_path / f"{name}.py").write_text(text)
        assert titanlite(["lab", "exercise", *arguments]) == 2
        err = capsys.readouterr().err
        assert re.fullmatch(f"titanlite lab: {message}.*\n", err), err

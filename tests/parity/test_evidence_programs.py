"""The programs of docs/evidence: what compare says of those that its diagnosis was mended for."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import titanlite
from titanlite.tools.verify import Comparer

pytestmark = pytest.mark.filterwarnings("ignore")
PROGRAMS = Path(__file__).parents[2] / "docs/evidence/programs"
TODAY = json.loads((PROGRAMS.parent / "today.json").read_text())
"""Programs that agree, and of faulty ones, fast and slow, a pattern of what is said of them.

The fast ones, chosen by coverage.py, run the most lines of compare per second: nine in ten of all.
"""
SPEEDS = {"fast": [], "slow": [pytest.mark.slow]}


def said_of(program: str, comparer: Comparer, monkeypatch, capsys) -> str:
    monkeypatch.setattr(titanlite, "compare", comparer.compare)
    runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        pytest.param(program, cause, marks=marks, id=program)
        for speed, marks in SPEEDS.items()
        for program, cause in TODAY[speed].items()
    ],
)
def test_the_cause_is_named(program, cause, comparer, monkeypatch, capsys):
    said = said_of(program, comparer, monkeypatch, capsys)
    assert re.search(f"likely cause: .*{cause}", said), said


@pytest.mark.parametrize(
    "program",
    [pytest.param(p, marks=marks) for s, marks in SPEEDS.items() for p in TODAY["agree"][s]],
)
def test_a_correct_program_agrees(program, comparer, monkeypatch, capsys):
    assert "AGREES" in said_of(program, comparer, monkeypatch, capsys)


def test_the_counts_on_the_pages_are_those_of_the_runs():
    page, first = ((PROGRAMS / up / "README.md").read_text() for up in ("..", "../../.."))
    for run in (PROGRAMS.parent / "runs").glob("*_run.json"):
        judged = [x["judgement"] for x in json.loads(run.read_text()) if "Faulty" in x["table"]]
        (counts,) = re.findall(rf"(?m)runs/{run.name}\).*?(\|[ \d|]+)$", page)
        expected = [f" {judged.count(kind)} " for kind in ("right", "partly", "misleading")]
        assert counts.split("|")[2:5] == expected, run.name
    faulty, correct = (len([*PROGRAMS.glob(f"{k}*/*.py")]) for k in ("faulty", "correct"))
    assert f"{faulty + correct} programs were written after public threads, {faulty} with" in page
    assert f" {faulty} with one fault" in first

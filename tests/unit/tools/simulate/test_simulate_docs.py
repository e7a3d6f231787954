"""The pictures and tables on the pages match the output of their commands."""

import re
import runpy
from pathlib import Path

import pytest

from titanlite.cli import main
from titanlite.tools.learn.ladder.scripts import main as ladder

DOCS = Path(__file__).parents[4] / "docs"
PAGES = ["simulate.md", "ladder.md"]
picture_commands = runpy.run_path(str(DOCS / "make_pictures.py"))["picture_commands"]


def commands():
    pages = [*PAGES, "pictures.sh"]
    return [command for page in pages for command in picture_commands(DOCS / page)]


@pytest.mark.parametrize("command", commands(), ids=lambda command: Path(command[-1]).stem)
def test_picture_is_what_its_command_makes(command, tmp_path, monkeypatch):
    monkeypatch.chdir(DOCS.parent)
    shown = DOCS.parent / command[-1]
    assert command[-2] in ("--svg", "--png", "--memory")
    assert main([*command[:-1], str(tmp_path / shown.name), "--quiet"]) == 0
    if shown.suffix == ".svg":
        assert (tmp_path / shown.name).read_text() == shown.read_text()
    else:
        # Other versions of matplotlib draw other pixels; the size is at the start of the file.
        assert (tmp_path / shown.name).read_bytes()[:24] == shown.read_bytes()[:24]


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_shown_has_its_command(page):
    shown = set(re.findall(r"\((images/\S+\.(?:svg|png))\)", (DOCS / page).read_text()))
    made = {command[-1].removeprefix("docs/") for command in picture_commands(DOCS / page)}
    assert shown == made


def test_needs_of_a_strategy_file_stand_on_the_page():
    source = (DOCS / "simulate" / "context_parallel.py").read_text()
    shown = re.search(r"def needs.*?(?=\n\n\n)", source, flags=re.DOTALL)[0]
    assert f"```python\n{shown}\n```" in (DOCS / "simulate.md").read_text()


def test_the_strategy_file_of_the_page_is_1f1b(tmp_path, capsys):
    """It is given half a step for each message, and the same costs."""
    text = (DOCS / "simulate.md").read_text()
    source = re.search(r"```python\n(# mine.py\n.*?)```", text, flags=re.DOTALL)
    assert source is not None
    path = tmp_path / "mine.py"
    path.write_text(source[1])
    sizes = ["--workers", "6", "--batches", "12", "--quiet"]
    assert main(["simulate", str(path), *sizes]) == 0
    costs = ["--costs-per", "model", "--forward", "24", "--backward", "48", "--latency", "1/2"]
    assert main(["simulate", "1F1B", *sizes, *costs]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[2].split()[1:] == table[5].split()[1:]


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("ladder.md", "ladder"),
        (
            "simulate.md",
            "1F1B --workers 4 --batches 8 --quiet "
            "--compare Interleaved1F1B ZB-H1 ZB-H2 ZBV DualPipeV",
        ),
    ],
)
def test_table_is_what_its_command_prints(page, command, capsys):
    assert main(["simulate", *command.split()]) == 0
    assert capsys.readouterr().out.strip() in (DOCS / page).read_text()


def test_fast_links_save_what_the_page_says(capsys):
    assert main(["simulate", "ladder", "--workers-per-node", "4"]) == 0
    table = capsys.readouterr().out
    page = " ".join((DOCS / "ladder.md").read_text().split())
    for name, claim in (
        ("2D DP x TP", "2D DP x TP takes {} s instead of 33.6"),
        ("3D DP x PP x TP", "3D {} s instead of 20.4"),
        ("1D DP, ring", "DP with a ring {} s instead of 15.8"),
    ):
        row = next(line for line in table.splitlines() if line.startswith(name))
        assert claim.format(row.removeprefix(name).split()[1]) in page


def test_script_draws_what_the_page_shows(capsys):
    page = (DOCS / "ladder.md").read_text()
    assert "titanlite ladder 2d-pp\n" in page
    assert ladder(["2d-pp", "--columns", "110"]) == 0
    picture, *_ = capsys.readouterr().out.split("\n\n")
    assert picture in page

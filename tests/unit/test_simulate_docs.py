"""The pictures and tables on the pages match the output of their commands."""

import re
import runpy
from pathlib import Path

import pytest

from titanlite.cli import main
from titanlite.simulate.ladder.__main__ import main as ladder

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["simulate.md", "ladder.md"]
picture_commands = runpy.run_path(str(DOCS / "make_pictures.py"))["picture_commands"]


def commands():
    pages = [*PAGES, "pipeline_parallel.md"]
    return [command for page in pages for command in picture_commands(DOCS / page)]


@pytest.mark.parametrize("command", commands(), ids=lambda command: Path(command[-1]).stem)
def test_picture_is_what_its_command_makes(command, tmp_path):
    shown = DOCS.parent / command[-1]
    assert command[-2] == "--svg"
    assert main([*command[:-1], str(tmp_path / shown.name), "--quiet"]) == 0
    assert (tmp_path / shown.name).read_text() == shown.read_text()


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_shown_has_its_command(page):
    shown = set(re.findall(r"\((images/\S+\.svg)\)", (DOCS / page).read_text()))
    made = {command[-1].removeprefix("docs/") for command in picture_commands(DOCS / page)}
    assert shown == made


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("ladder.md", "ladder"),
        ("ladder.md", "ladder --workers-per-node 4"),
        ("ladder.md", "ladder --dp 4 --pp 2 --items 32 --overlap --microbatch 2"),
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


def test_script_draws_what_the_page_shows(capsys):
    page = (DOCS / "ladder.md").read_text()
    assert "python -m titanlite.simulate.ladder 2d-pp\n" in page
    assert ladder(["2d-pp", "--columns", "110"]) == 0
    picture, *_ = capsys.readouterr().out.split("\n\n")
    assert picture in page

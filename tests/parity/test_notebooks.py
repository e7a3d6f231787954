"""The notebooks in docs/ come to what they show, and notes of the lab become notebooks."""

import json
import re
from pathlib import Path

import pytest
from make_notebooks import DOCS, NOTEBOOKS, code_cells, from_page, printed, run


def conclusions(text: str) -> list[str]:
    """The words of a verdict and its cause, or of all that is printed, without numbers."""
    verdict = re.sub(r"(?<=AGREES).*", "", text.split("\nparallel ")[0], flags=re.DOTALL)
    return re.sub(r"\([^()]*\)|\d[\d.,e+-]*", "", verdict).split()


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_comes_to_what_it_shows(path: Path) -> None:
    notebook = json.loads(path.read_text())
    for cell, text in zip(code_cells(notebook), run(notebook), strict=True):
        assert conclusions(text) == conclusions(printed(cell))


def test_notes_of_the_lab_become_notebooks() -> None:
    notes = [note.read_text() for note in (DOCS / "lab").glob("[0-9]*.md")]
    assert len(notes) == 12
    for note in notes:
        cells = code_cells(from_page(note))
        assert len(cells) == note.count("```python\n")
        assert sum(cell["outputs"] != [] for cell in cells) == note.count("```text\n")

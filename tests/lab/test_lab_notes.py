"""The code in the notes runs and prints the quoted output."""

import contextlib
import io
import re
from pathlib import Path

import pytest

NOTES = Path(__file__).parents[2] / "docs" / "lab"
# A block of code, and the block of its output if one follows directly.
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n?```text\n(.*?)```\n)?", re.DOTALL)


@pytest.mark.parametrize("path", sorted(NOTES.glob("[0-9]*.md")), ids=lambda path: path.stem)
def test_a_note_prints_what_it_says(path):
    namespace = {"__name__": "note"}
    blocks = BLOCK.findall(path.read_text())
    assert blocks
    for code, expected in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, path.name, "exec"), namespace)
        assert output.getvalue() == expected


def test_the_index_names_every_note():
    index = (NOTES / "README.md").read_text()
    for path in NOTES.glob("[0-9]*.md"):
        assert f"({path.name})" in index

"""Run the notebooks in docs/notebooks, and write the lab's notes as notebooks beside them.

    python docs/make_notebooks.py        run them, and store what their cells print
    python docs/make_notebooks.py lab    write docs/lab/*.ipynb: a note's blocks of code are cells

Jupyter is not needed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))

# Runs the cells of a list on stdin as Jupyter does: a last expression is shown.
CELLS = """\
import ast, contextlib, io, json, linecache, sys
_texts = []
for _number, _source in enumerate(json.load(sys.stdin), 1):
    _file, _out = f"<cell {_number}>", io.StringIO()
    linecache.cache[_file] = (len(_source), None, _source.splitlines(True), _file)
    _body = ast.parse(_source).body
    _last = [_body.pop()] if isinstance(_body[-1], ast.Expr) else []
    with contextlib.redirect_stdout(_out):
        exec(compile(ast.Module(_body, []), _file, "exec"), globals())
        exec(compile(ast.Interactive(_last), _file, "single"), globals())
    _texts.append(_out.getvalue())
with open(sys.argv[1], "w") as _results:
    json.dump(_texts, _results)
"""


def run(notebook: dict[str, Any]) -> list[str]:
    """What each code cell prints, run in order in a new process."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        command = [sys.executable, "-c", CELLS, str(results)]
        subprocess.run(command, input=json.dumps(sources), text=True, check=True, timeout=600)
        texts: list[str] = json.loads(results.read_text())
    return texts


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What is stored as the output of a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def code(source: str, text: str = "") -> dict[str, Any]:
    """A code cell that printed `text`."""
    lines = text.splitlines(keepends=True)
    outputs = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs}
    return {**cell, "source": source.strip("\n").splitlines(keepends=True)}


def prose(text: str) -> dict[str, Any]:
    lines = text.strip("\n").splitlines(keepends=True)
    return {"cell_type": "markdown", "metadata": {}, "source": lines}


def from_page(page: str) -> dict[str, Any]:
    """A page as a notebook: its blocks of Python, and what they print below them."""
    cells = []
    # Prose, then code and its output, in turn.
    block = r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```\n)?"
    text, *parts = re.split(block, page, flags=re.MULTILINE | re.DOTALL)
    for source, output, after in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        cells += [prose(text), code(source, output or "")]
        text = after
    return made([cell for cell in [*cells, prose(text)] if cell["source"]])


def made(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The notebook of these cells."""
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write(notebook: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True) + "\n")
    print(path)


if __name__ == "__main__":
    if sys.argv[1:] == ["lab"]:
        for note in sorted((DOCS / "lab").glob("[0-9]*.md")):
            write(from_page(note.read_text()), note.with_suffix(".ipynb"))
    else:
        for path in NOTEBOOKS:
            notebook = json.loads(path.read_text())
            for cell, text in zip(code_cells(notebook), run(notebook), strict=True):
                cell.update(code("".join(cell["source"]), text))
            write(made(notebook["cells"]), path)

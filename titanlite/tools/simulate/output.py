"""Write the files that the command line asks for.

A command writes them before it prints: what reads its output may close it early, as `head` does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from titanlite.tools.simulate.work import SimulationError


def write(path: str | Path, text: str) -> str:
    """Write `text` to `path`; returns a line to print. Raises SimulationError if that fails."""
    return write_with(Path(path), partial(_write_text, text))


def write_with(path: Path, draw: Callable[[Path], None]) -> str:
    """Write a file by `draw(path)`, as `write` does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path)
    except OSError as error:
        raise SimulationError(f"{path}: cannot be written ({error.strerror})") from error
    return f"wrote {path}"


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")

"""Write a text file that the command line asks for."""

from __future__ import annotations

from pathlib import Path

from titanlite.simulate.work import SimulationError


def write(path: str | Path, text: str) -> None:
    """Write `text` to `path` and say so. Raises SimulationError if the file cannot be written."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SimulationError(f"{path}: cannot be written ({error.strerror})") from error
    print(f"wrote {path}")

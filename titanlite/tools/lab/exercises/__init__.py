"""Exercises of the lab's notes that check themselves: `titanlite lab exercise`.

Each exercise is a module of this folder with the name of its function. Its first line names the
note and says what it asks for. It has the worked solution, whose signature and docstring are the
task, and EXERCISE with everything that judges an answer. The list loads no torch.
"""

import re
from pathlib import Path


def _read() -> dict[str, tuple[int, str]]:
    """The note of each exercise, and what it asks for, by name and in the order of the notes."""
    found = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if first := re.match(r'"""Note (\d+): (.+)\."""', path.read_text(encoding="utf-8")):
            found.append((int(first[1]), path.stem, first[2]))
    return {name: (note, summary) for note, name, summary in sorted(found)}


EXERCISES = _read()

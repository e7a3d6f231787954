"""The public names: docs/api lists them, and importing titanlite stays light."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import titanlite

ROOT = Path(__file__).parents[2]


def test_docs_list_the_public_names() -> None:
    # In a process of its own: a test may have registered models, or replaced functions.
    command = [sys.executable, "-c", "import json, make_api; print(json.dumps(make_api.pages()))"]
    folder = ROOT / "docs"
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout
    written = {path.name: path.read_text() for path in (folder / "api").iterdir()}
    assert written == json.loads(made), "run: python docs/make_api.py"
    for name in titanlite.__all__:
        assert sum(text.count(f"\n## {name}\n") for text in written.values()) == 1
        assert f"\n- [{name}](" in written["README.md"]


def test_every_public_name_is_in_one_place() -> None:
    named = [
        n for modules in titanlite.PUBLIC.values() for names in modules.values() for n in names
    ]
    assert sorted(named) == sorted(titanlite.__all__)
    assert set(titanlite.__all__) <= set(dir(titanlite))

"""The public names: docs/api.md lists them, and importing titanlite stays light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import titanlite

ROOT = Path(__file__).parents[2]


def test_docs_list_the_public_names() -> None:
    command = [sys.executable, str(ROOT / "docs/make_api.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    written = (ROOT / "docs/api.md").read_text()
    assert written == made, "run: python docs/make_api.py > docs/api.md"
    for name in titanlite.__all__:
        assert f"### {name}\n" in written


def test_every_public_name_is_in_one_place() -> None:
    named = [
        n for modules in titanlite.PUBLIC.values() for names in modules.values() for n in names
    ]
    assert sorted(named) == sorted(titanlite.__all__)
    assert set(titanlite.__all__) <= set(dir(titanlite))

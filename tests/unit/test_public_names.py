"""The public names: docs/api lists them, and importing titanlite stays light."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
        assert f"[{name}](titanlite.md#{name.lower()})" in written["README.md"]
        entry = written["titanlite.md"].partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        (page,) = re.findall(r"\(\[example\]\(../(.*?)\)\)", entry) or [""]
        assert f"{name}(" in (folder / page).read_text() if page else f"titanlite.{name}" in entry


def test_every_public_name_is_in_one_place() -> None:
    named = [name for names in titanlite.PUBLIC.values() for name in names]
    assert sorted(named) == sorted(titanlite.__all__)
    assert set(titanlite.__all__) <= set(dir(titanlite))
    assert len(named) == 32


@pytest.mark.parametrize("package", ["training", "modules", "mesh", "ranks", "parallelize"])
def test_a_package_has_its_public_names_after_import_titanlite(package: str) -> None:
    module = getattr(titanlite, package)
    names = [name for names in module.PUBLIC.values() for name in names]
    assert all(getattr(module, name).__name__ for name in names if name[1].islower())
    assert set(names) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing

"""docs/examples: what the broken programs print is on the page, and the corrected ones agree."""

import re
from pathlib import Path

import make_examples
import pytest

FOLDER = Path(make_examples.__file__).parent / "examples"


def test_the_page_shows_what_each_program_prints() -> None:
    for path, write in make_examples.PAGES.items():
        page = path.read_text(encoding="utf-8")
        assert write(page) == page, "run: python docs/make_examples.py"
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    programs = {path.name for path in FOLDER.glob("*.py")}
    parts = page.split("\n## ")[1:]
    assert {re.findall(r"\]\((\w+\.py)\)", part)[0] for part in parts} == programs
    for part in parts:
        (name,) = set(re.findall(r"\]\((\w+\.py)\)", part))
        (line,) = re.findall(r"```python\n(.*)\n```", part)
        assert f"{line}\n" in (FOLDER / name).read_text(encoding="utf-8")
        wrong, corrected = re.findall(
            rf"examples/{name}((?: --corrected)?\n(?:.+\n|\n)*?)```", part
        )
        assert "DIFFERS: " in wrong
        assert "likely cause: " in wrong
        assert corrected.startswith(" --corrected\n")
        assert "AGREES: " in corrected
    if why := make_examples.missing_torchtitan():
        pytest.skip(f"torchtitan_module.py has not run: {why}")

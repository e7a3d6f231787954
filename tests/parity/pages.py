"""The files that a page of docs/ shows, for the tests that run them."""

import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def write_example(name: str, page: str, folder: Path) -> None:
    """Copy docs/examples/`name`, and write the blocks of the page that are further files.

    A block of code begins with the name of its file. Of a file that is there, it is an excerpt.
    """
    ignored = shutil.ignore_patterns("__pycache__", "outputs")
    shutil.copytree(DOCS / "examples" / name, folder, dirs_exist_ok=True, ignore=ignored)
    text = (DOCS / page).read_text()
    for file, block in re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", text, re.DOTALL):
        path = folder / file
        if path.exists():
            assert block.strip("\n") in path.read_text(), f"{page} shows another {file}: {block}"
        else:
            path.write_text(block)

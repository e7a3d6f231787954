"""The files that a page of docs/ shows, for the tests that run them."""

import re
from pathlib import Path


def write_files(page: Path, folder: Path) -> None:
    """Write each block of code that begins with the name of its file."""
    for text in re.findall(r"```(?:python|toml)\n(.*?)```", page.read_text(), re.DOTALL):
        if name := re.match(r"# (\S+)\n", text):
            path = folder / name[1]
            path.parent.mkdir(exist_ok=True)
            assert not path.exists() or path.read_text() == text, f"the page has another {path}"
            path.write_text(text)

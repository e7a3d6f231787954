"""Write what the examples print into docs/examples/README.md: `python docs/make_examples.py`."""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

FOLDER = Path(__file__).parent / "examples"
BLOCK = re.compile(r"(?<=```\n)\$ python docs/examples/(\w+\.py)(.*)\n(?:.*\n)*?(?=```)")


def main() -> None:
    page = FOLDER / "README.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")


def written(page: str) -> str:
    """The page with what each command prints, without the table and what is also seen."""

    def block(found: re.Match[str]) -> str:
        said, _, _ = output(FOLDER / found[1], *found[2].split()).partition("\n\nparallel ")
        verdict, *rest = said.split("\n\n")
        verdict = re.sub(r"(DIFFERS:.*|AGREES:)[^$]*", r"\1", verdict)
        verdict = re.sub(r" \(\d+\.\d s\)$", "", verdict)
        cause = "".join(f"\n{text}\n[...]\n" for text in rest[:1])
        shown = f"{verdict} [...]\n{cause}"
        return f"$ python docs/examples/{found[1]}{found[2]}\n{shown}"

    return BLOCK.sub(block, page)


def output(path: Path, *arguments: str) -> str:
    """What an example prints; its ranks are threads of this process."""
    with patch("sys.argv", [str(path), *arguments]), redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    main()

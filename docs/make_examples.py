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
    """The page with what each command prints, without tables and what is also seen."""

    def block(found: re.Match[str]) -> str:
        header, _, *rest = output(FOLDER / found[1], *found[2].split()).split("\n\n")
        verdict = re.sub(r"(DIFFERS:.*|AGREES:)[^$]*", r"\1", rest[0])
        verdict = re.sub(r" \(\d+\.\d s\)$", "", verdict)
        causes = [f"\n{text.strip()}\n" for text in rest[1:2]] + ["[...]\n"] * (len(rest) > 2)
        shown = f"{verdict} [...]\n{''.join(causes)}"
        if not verdict.startswith("AGREES"):
            shown = f"{header}\n[...]\n{shown}"
        return f"$ python docs/examples/{found[1]}{found[2]}\n{shown}"

    return BLOCK.sub(block, page)


def output(path: Path, *arguments: str) -> str:
    """What an example prints; its ranks are threads of this process."""
    with patch("sys.argv", [str(path), *arguments]), redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    main()

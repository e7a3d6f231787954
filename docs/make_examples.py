"""Write what the examples print into docs/examples/README.md, and what README's program prints.

python docs/make_examples.py
"""

from __future__ import annotations

import io
import re
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

FOLDER = Path(__file__).parent / "examples"
README = Path(__file__).parents[1] / "README.md"
PROGRAM = re.compile(r"(?<=```python\n)(import torch\n.*?)(```\n\n```\n).*?(?=```)", re.DOTALL)
BLOCK = re.compile(r"(?<=```\n)\$ python docs/examples/(\w+\.py)(.*)\n(?:.*\n)*?(?=```)")


def main() -> None:
    page = FOLDER / "README.md"
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")


def written(page: str) -> str:
    """The page with what each command prints, without tables and what is also seen."""

    def block(found: re.Match[str]) -> str:
        said = output(FOLDER / found[1], *found[2].split())
        return f"$ python docs/examples/{found[1]}{found[2]}\n{shown(said)}"

    return BLOCK.sub(block, page)


def readme(page: str) -> str:
    """README with what its program prints."""

    def block(found: re.Match[str]) -> str:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "program.py"
            path.write_text(found[1].replace('split="dp"', 'split="dp", threads=True'))
            return f"{found[1]}{found[2]}{shown(output(path))}"

    return PROGRAM.sub(block, page)


def shown(said: str) -> str:
    """The verdict and the likely cause of what `compare` printed."""
    verdict, *rest = said.partition("\n\nparallel ")[0].split("\n\n")
    verdict = re.sub(r"(DIFFERS:.*|AGREES:)[^$]*", r"\1", verdict)
    verdict = re.sub(r" \(\d+\.\d s\)$", "", verdict)
    return f"{verdict} [...]\n" + "".join(f"\n{text}\n[...]\n" for text in rest[:1])


def output(path: Path, *arguments: str) -> str:
    """What an example prints; its ranks are threads of this process."""
    with patch("sys.argv", [str(path), *arguments]), redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    main()

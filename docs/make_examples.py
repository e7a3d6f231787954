"""Write what programs of the docs print below them, and in docs/examples/README.md.

python docs/make_examples.py
"""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from PIL import Image
from sklearn.datasets import load_digits

import titanlite

FOLDER = Path(__file__).parent / "examples"
README = Path(__file__).parents[1] / "README.md"
FAULTS, DATA = (Path(__file__).parent / name for name in ("faults.md", "data.md"))
PROGRAM = re.compile(r"(?<=```python\n)(import torch\n.*?)(```\n\n```\n).*?(?=```)", re.DOTALL)
DEADLOCK = re.compile(r"(?<=```python\n)(# deadlock.py\n.*?)(```\n\n```\n).*?(?=```)", re.DOTALL)
FILE = re.compile(r"```\w+\n# (pictures\.\w+)\n(.*?)```", re.DOTALL)
TRAINED = re.compile(r"(?<=```\n)\$ titanlite train pictures\.toml\n.*?(?=```)", re.DOTALL)
BLOCK = re.compile(r"(?<=```\n)\$ python docs/examples/(\w+\.py)(.*)\n(?:.*\n)*?(?=```)")


def main() -> None:
    for page, write in PAGES.items():
        page.write_text(write(page.read_text(encoding="utf-8")), encoding="utf-8")


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


def faults(page: str) -> str:
    """faults.md with the report of its deadlock, without its last part, the stack of a rank."""

    def block(found: re.Match[str]) -> str:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "deadlock.py"
            path.write_text(found[1])
            try:
                output(path)
            except titanlite.RankError as error:
                report = f"{error}\n{error.rank_traceback}".replace(f"{folder}/", "")
        report = report.partition("Python stack ")[0]
        return f"{found[1]}{found[2]}[...]\ntitanlite.errors.RankError: {report}[...]\n"

    return DEADLOCK.sub(block, page)


def data(page: str) -> str:
    """data.md with two lines of the run on a folder of pictures, which is one of digits here."""
    command = [sys.executable, "-m", "titanlite", "train", "pictures.toml", "--training.steps=1"]
    with TemporaryDirectory() as folder:
        for name, text in FILE.findall(page):
            (Path(folder) / name).write_text(text)
        (Path(folder) / "data").mkdir()
        for number, image in enumerate(load_digits().images[:200]):
            Image.fromarray((image * 15.9).astype("uint8")).save(f"{folder}/data/{number}.png")
        environment = {**os.environ, "PYTHONPATH": str(README.parent)}
        said = subprocess.check_output(command, cwd=folder, env=environment, text=True)
    lines = [line for line in said.splitlines() if line.startswith(("  data ", "sampled "))]
    shown = "".join(f"[...]\n{line}\n" for line in lines)
    return TRAINED.sub(f"$ titanlite train pictures.toml\n{shown}", page)


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


PAGES = {FOLDER / "README.md": written, README: readme, FAULTS: faults, DATA: data}


if __name__ == "__main__":
    main()

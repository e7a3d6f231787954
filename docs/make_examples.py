"""Write what programs of the docs print below them, and in docs/examples/README.md.

python docs/make_examples.py
"""

from __future__ import annotations

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from PIL import Image
from sklearn.datasets import load_digits

import titanlite
from titanlite.config import parse_args, resolve_job
from titanlite.errors import ConfigError
from titanlite.observe.first_screen import in_brief
from titanlite.observe.run_facts import device_fact, run_facts
from titanlite.tools.torchtitan.stand_ins import require_torchtitan

FOLDER = Path(__file__).parent / "examples"
README = Path(__file__).parents[1] / "README.md"
FAULTS, DATA, INDEX = (Path(__file__).parent / f"{name}.md" for name in ("faults", "data", "index"))
VERIFY, TRAINING = (
    Path(__file__).parent / f"start/first_{name}.md" for name in ("verify", "training")
)
PROGRAM = re.compile(r"(?<=```python\n)(import torch\n.*?)(```\n\n```\n).*?(?=```)", re.DOTALL)
DEADLOCK = re.compile(r"(?<=```python\n)(# deadlock.py\n.*?)(```\n\n```\n).*?(?=```)", re.DOTALL)
FILE = re.compile(r"```\w+\n# (pictures\.\w+)\n(.*?)```", re.DOTALL)
TRAINED = re.compile(r"(?<=```\n)\$ titanlite train pictures\.toml\n.*?(?=```)", re.DOTALL)
SCREEN = re.compile(
    r"(?<=```\n)(\$ titanlite verify [^\[]*)?(?:\[\.\.\.\]\n)?(?:DIFFERS|AGREES).*?(?=```)",
    re.DOTALL,
)
HEADS = re.compile(r"AGREES:|DIFFERS: .*?(?=\s\(\d)|likely cause: (?:[^\[\n].*\n)+")
BLOCK = re.compile(r"(?<=```\n)\$ python docs/examples/(\w+\.py)(.*)\n(?:.*\n)*?(?=```)")


def main() -> None:
    for page, write in PAGES.items():
        page.write_text(write(page.read_text(encoding="utf-8")), encoding="utf-8")


def written(page: str) -> str:
    """The page with what each command prints, without tables and what is also seen."""

    def block(found: re.Match[str]) -> str:
        if "torchtitan" in found[1] and missing_torchtitan():
            return found[0]
        said = output(FOLDER / found[1], *found[2].split())
        return f"$ python docs/examples/{found[1]}{found[2]}\n{shown(said)}"

    return BLOCK.sub(block, page)


def missing_torchtitan() -> str:
    """Why programs that import TorchTitan do not run here."""
    try:
        require_torchtitan()
    except ConfigError as error:
        return str(error)
    return ""


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


def start(page: str) -> str:
    """first_verify.md or index.md, with the verdicts and causes of the program and the job."""
    text = VERIFY.read_text(encoding="utf-8")
    program, loss = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    def block(found: re.Match[str]) -> str:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "first.py"
            if found[1]:
                (Path(folder) / "my_loss.py").write_text(loss)
                (Path(folder) / "configs").symlink_to(README.parent / "configs")
                _, *words = shlex.split(found[1].replace("\\\n", ""))
                command = [sys.executable, "-m", *words, "--threads"]
                environment = {**os.environ, "PYTHONPATH": str(README.parent)}
                run = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE)
                said = run.stdout.decode()
            else:
                is_mean = "AGREES" in found[0]
                path.write_text(program.replace(".sum()", ".mean()") if is_mean else program)
                said = output(path)
        screen = found[0]
        for old, new in zip(HEADS.findall(screen), HEADS.findall(said), strict=True):
            screen = screen.replace(old, new)
        return screen

    return SCREEN.sub(block, page)


def training(page: str) -> str:
    """first_training.md with the first facts of its job, and its mistake on three ranks."""
    with TemporaryDirectory() as home:
        job = Path(home) / "job.toml"
        job.write_text(re.findall(r"```toml\n(# job.toml\n.*?)```", page, re.DOTALL)[0])
        config = parse_args([f"--job.config_file={job}"])
    resolved = resolve_job(config)
    try:
        resolve_job(config, 3)
    except titanlite.ConfigError as error:
        (mistake,) = error.problems
    device = device_fact(resolved, "cpu", "gloo", 4, 0)
    numel, folder = resolved.model.num_parameters, Path("outputs")
    facts = run_facts(resolved, device, "", 1498, 299, num_parameters=numel, folder=folder)
    for fact in in_brief("", facts, [], "")[1]:
        page = re.sub(rf"(?m)^  {fact.name:<12} .*", f"  {fact.name:<12} {fact.text}", page)
    return re.sub(r"(?m)^parallelism: .*", mistake, page)


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


PAGES = {
    FOLDER / "README.md": written,
    README: readme,
    FAULTS: faults,
    DATA: data,
    INDEX: start,
    VERIFY: start,
    TRAINING: training,
}


if __name__ == "__main__":
    main()

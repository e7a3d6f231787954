"""Makes the pictures of these pages anew, by the commands they show.

python docs/make_pictures.py [--runs] [PAGE.md ...]

If no pages are named, those of the lab's notes (lab_pictures.py) and of context parallelism
(ring_pictures.py) are made too.

`titanlite simulate` and `titanlite learn` give the same picture each time. With --runs, the
`titanlite train` commands that are followed by a `cp` of a picture, or by a `titanlite plan` that
draws one, are run too: those pictures are of a real run, and take minutes.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def picture_commands(page: Path) -> list[list[str]]:
    """The commands in the code blocks of `page` that end with a picture's name, lines joined."""
    ending = r"--(?:svg|png|memory) docs/images/\S+"
    command = rf"^titanlite ((?:simulate|learn) .*{ending})$"
    lines = re.findall(command, _joined(page), flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def run_commands(page: Path) -> list[tuple[list[str], list[str]]]:
    """The training runs of `page` that are drawn, each with the command that makes its picture."""
    found = re.findall(
        r"^titanlite (train .*)\n(cp \S+\.svg \S+\.svg|titanlite plan .*--svg.*)$",
        _joined(page),
        flags=re.MULTILINE,
    )
    return [(shlex.split(train), shlex.split(then)) for train, then in found]


def _joined(page: Path) -> str:
    return re.sub(r" *\\\n *", " ", page.read_text(encoding="utf-8"))


def main(arguments: Sequence[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from titanlite.cli import main as titanlite

    names = [argument for argument in arguments if argument != "--runs"]
    if not names:
        from lab_pictures import main as draw_lab
        from ring_pictures import main as draw_rings

        draw_lab([str(ROOT / "docs" / "images" / "lab")])
        draw_rings(ROOT / "docs" / "images" / "context_parallel")
    pages = [Path(name) for name in names] or sorted((ROOT / "docs").glob("*.md"))
    for page in pages:
        for command in picture_commands(page):
            is_quiet = command[0] != "simulate" or "--quiet" in command
            status = titanlite([*command, *([] if is_quiet else ["--quiet"])])
            if status:
                return status
        for command, then in run_commands(page) if "--runs" in arguments else ():
            # A process of its own, which ends with its ranks.
            status = subprocess.call([sys.executable, "-m", "titanlite", *command], cwd=ROOT)
            if status:
                return status
            if then[0] == "cp":
                shutil.copy(ROOT / then[1], ROOT / then[2])
            elif status := titanlite(then[1:]):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

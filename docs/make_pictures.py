"""Makes the pictures of these pages anew, by the `titanlite simulate` commands they show.

python docs/make_pictures.py [PAGE.md ...]
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def picture_commands(page: Path) -> list[list[str]]:
    """The commands in the code blocks of `page` that write an SVG, continued lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^titanlite (simulate .*--svg .*)$", text, flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


def main(arguments: Sequence[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from titanlite.cli import main as titanlite

    pages = [Path(argument) for argument in arguments] or sorted((ROOT / "docs").glob("*.md"))
    for page in pages:
        for command in picture_commands(page):
            status = titanlite([*command, "--quiet"])
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

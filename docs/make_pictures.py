"""Makes the pictures of these pages anew, by the commands that they or pictures.sh show.

python docs/make_pictures.py [--runs] [PAGE ...]

If no pages are named, those of the lab's notes (lab_pictures.py), of features
(feature_pictures.py), of context parallelism (ring_pictures.py) and of a terminal (differs.svg,
plan/llama_405b.svg) are made too.

`titanlite simulate` and `titanlite learn` give the same picture each time. With --runs, the
`titanlite train` commands that are followed by a `cp` of a picture, or by a `titanlite plan` that
draws one, are run too: those pictures are of a real run, and take minutes.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape, unescape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "docs/images/plan/llama_405b.svg"
OWN = """
[model]
name = "plain"
flavor = "small"
[training]
global_batch_size = 4
local_batch_size = 4
[parallelism]
tensor_parallel_degree = 2
[experimental]
custom_import = "plain_model"
"""


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


def write_wrong_plan(folder: Path) -> None:
    """Write own.toml, and tests/parity/plain_model with an error in its plan, to a folder."""
    (folder / "own.toml").write_text(OWN)
    package = shutil.copytree(ROOT / "tests/parity/plain_model", folder / "plain_model")
    entry = '"layers.*.w2": RowwiseParallel(output_layouts=%s())'
    plan = (package / "plan.py").read_text().replace("import R", "import Partial, R")
    (package / "plan.py").write_text(plan.replace(entry % "Replicate", entry % "Partial"))


def draw_differs() -> str:
    """SVG: what `titanlite verify` says of the wrong plan."""
    with tempfile.TemporaryDirectory() as folder:
        write_wrong_plan(Path(folder))
        command = "titanlite verify own.toml --steps=2"
        printed = "\n".join(in_terminal(command, folder))
    # The time is another on each machine.
    printed = re.sub(r"\s\(\d+\.\d s\)$", "", printed, flags=re.MULTILINE)
    return draw_terminal(command, printed.rstrip().splitlines())


def words_of(text: str) -> str:
    """From verdict to table, on one line and without the time: of a screen, or a picture of one."""
    joined = " ".join(unescape(re.sub("<[^>]*>", "", text)).split())
    return re.sub(
        r" \(\d+\.\d s\)", "", joined[joined.index("DIFFERS: the ") :].partition(" step loss")[0]
    )


def draw_plan() -> str:
    """SVG: what `titanlite plan` says of the memory and the time of a step of Llama 3 405B."""
    command = "titanlite plan configs/plan/llama_405b.toml --hardware h100"
    parts = "\n".join(in_terminal(command, str(ROOT))).rstrip().split("\n\n")
    first = next(i for i, part in enumerate(parts) if re.match(r"[\d,]+ ranks: ", part))
    end = next(i for i, part in enumerate(parts) if part.startswith("communication of"))
    shown = [*parts[:2], "[...]", *parts[first:end], "[...]"]
    return draw_terminal(command, "\n\n".join(shown).replace("]\n\n", "]\n").splitlines())


def in_terminal(command: str, folder: str) -> list[str]:
    """The lines that a command prints in a terminal of 100 columns, with the codes of colours."""
    run = [sys.executable, "-m", *command.split()]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "xterm-256color"}
    leader, follower = pty.openpty()
    process = subprocess.Popen(run, cwd=folder, env=environment, stdout=follower)
    os.close(follower)
    printed = b""
    with contextlib.suppress(OSError):  # at the end, on Linux
        while read := os.read(leader, 1 << 16):
            printed += read
    process.wait()
    os.close(leader)
    return printed.decode().replace("\r\n", "\n").splitlines()


_STYLES = {
    r"^\$ .*": 'fill="#ffffff" font-weight="bold"',
    r"^DIFFERS:|^warning:|IT DOES NOT FIT": 'fill="#ff7b72" font-weight="bold"',
    r"^likely cause:|^also seen:": 'fill="#7ee787" font-weight="bold"',
    r"\S+ !(?: \(\d+ of \d+\))?": 'fill="#ff7b72"',
}


def draw_terminal(command: str, printed: Sequence[str]) -> str:
    """SVG: a terminal after `command`. It is dark on a light and on a dark page."""
    lines = [f"$ {command}", *printed]
    plain = [re.sub(r"\033\[[\d;]*m", "", line) for line in lines]
    letter, height = 7.0, 17
    width = round(2 * 18 + letter * max(map(len, plain)))
    depth = 44 + height * len(lines) + 10
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {depth}" width="{width}" '
        f'height="{depth}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" '
        f'font-size="{letter / 0.602:.1f}" fill="#d6deeb">',
        f"<title>{escape(command)}</title>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{depth - 1}" rx="8" fill="#161b22" '
        'stroke="#3d444d"/>',
    ]
    for number, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        drawn.append(f'<circle cx="{20 + 18 * number}" cy="17" r="5.5" fill="{colour}"/>')
    for row, (line, text) in enumerate(zip(lines, plain, strict=True)):
        y = 48 + height * row
        spans = escape(text, quote=False)
        for pattern, style in _STYLES.items():
            spans = re.sub(pattern, rf"<tspan {style}>\g<0></tspan>", spans)
        if line != text:
            spans, x = "", 18.0
            for codes, part in _runs(line):
                # Colours of the text and behind it, as the terminal's codes have them.
                found = re.fullmatch(r"38;2;(.*);48;2;(.*)", codes)
                style, part_width = "", letter * len(part)
                if found:
                    ink, back = (f"rgb({one.replace(';', ',')})" for one in found.groups())
                    style = f' fill="{ink}"'
                    drawn.append(
                        f'<rect x="{x:g}" y="{y - 13}" width="{part_width:g}" height="{height}" '
                        f'fill="{back}"/>'
                    )
                spans += f"<tspan{style}>{escape(part, quote=False)}</tspan>"
                x += part_width
        # Each line has the width that it has in the font that the picture was laid out for.
        if text:
            size = f'textLength="{letter * len(text):g}"'
            drawn.append(f'<text x="18" y="{y}" {size} xml:space="preserve">{spans}</text>')
    return "\n".join([*drawn, "</svg>", ""])


def _runs(line: str) -> list[tuple[str, str]]:
    """The codes of colours of a line, each with its text."""
    first, *rest = re.split(r"\033\[([\d;]*)m", line)
    found = [("", first)]
    for codes, part in zip(rest[::2], rest[1::2], strict=True):
        if part and found[-1][0] == codes:
            found[-1] = codes, found[-1][1] + part
        elif part:
            found.append((codes, part))
    return found


def main(arguments: Sequence[str]) -> int:
    sys.path.insert(0, str(ROOT))
    from titanlite.cli import main as titanlite

    names = [argument for argument in arguments if argument != "--runs"]
    if not names:
        from feature_pictures import main as draw_features
        from lab_pictures import main as draw_lab
        from ring_pictures import main as draw_rings

        (ROOT / "docs/images/differs.svg").write_text(draw_differs())
        PLAN.write_text(draw_plan())
        draw_lab([str(ROOT / "docs" / "images" / "lab")])
        draw_features(ROOT / "docs" / "images" / "features")
        draw_rings(ROOT / "docs" / "images" / "context_parallel")
    pages = [Path(name) for name in names] or [
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "docs/pictures.sh",
    ]
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

"""Runs the programs under docs/evidence/programs, each in its own process, and writes a table.

    python docs/evidence/run.py [--jobs 2] [--output FOLDER] [--only WORD] [--table FILE]

Each program ends with a call of titanlite.compare and prints its result. The complete outputs go to
FOLDER, one file per program; the table has the verdict and the first sentence of the diagnosis.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = sorted((HERE / "programs").glob("*/*.py"))
SECONDS = 400


def run(program: Path, output: Path) -> tuple[str, str, float]:
    """The verdict of one program, the first sentence of its diagnosis, and its seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{HERE.parents[1]}:{environment.get('PYTHONPATH', '')}"
    start = time.time()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", program],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment,
        )
        text = done.stdout + ("\n--- stderr ---\n" + done.stderr if done.stderr else "")
    except subprocess.TimeoutExpired as expired:
        text = f"TIMEOUT after {SECONDS} s\n{expired.stdout or ''}"
    seconds = time.time() - start
    file = output / program.parent.name / f"{program.stem}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return *verdict(text), seconds


def verdict(text: str) -> tuple[str, str]:
    if "AGREES" in text:
        return "agrees", ""
    cause = re.search(r"likely cause: (.*?)(?:\n\n|\Z)", text, re.S)
    sentence = " ".join(cause.group(1).split()) if cause else ""
    if "DIFFERS" in text:
        return "differs", sentence or "(no cause)"
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "error", sentence or (lines[-1].strip() if lines else "(no output)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("evidence-outputs"))
    parser.add_argument("--only", default="", help="programs whose path contains this word")
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    programs = [program for program in PROGRAMS if args.only in str(program)]
    held_out = set((HERE / "held_out.txt").read_text().split())
    rows = ["| program | held out | result | likely cause |", "| --- | --- | --- | --- |"]
    with ThreadPoolExecutor(args.jobs) as pool:
        results = pool.map(lambda program: run(program, args.output), programs)
        for program, (result, sentence, seconds) in zip(programs, results, strict=True):
            name = f"{program.parent.name}/{program.stem}"
            rows.append(f"| {name} | {'yes' if name in held_out else ''} | {result} | {sentence} |")
            print(f"{name}: {result} ({seconds:.0f} s) {sentence[:160]}", flush=True)
    if args.table:
        args.table.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()

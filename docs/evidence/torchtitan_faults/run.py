"""Verifies the plans of TorchTitan that have a fault, and prints what is said of each.

    python docs/evidence/torchtitan_faults/run.py [NAME ...]

plans.py has one wrong entry of a plan each, upstream.py faults that were recorded upstream. A fault
is named if the first sentence has the altered module, or, of a recorded one, what upstream.py says.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
sys.path[:0] = [str(HERE.parent), str(ROOT)]
SECONDS = 900


def judge(module: str, name: str, fault: Any) -> tuple[str, str]:
    """The verdict on one fault, and the first sentence of the diagnosis."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        job = f"torchtitan:torchtitan_faults.{module}:{name}"
        command = [sys.executable, "-W", "ignore", "-m", "titanlite", "verify", job, *fault.plan]
        done = subprocess.run(
            [*command, "--steps=1", f"--json={result}"],
            cwd=HERE.parent,
            env={**os.environ, "PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if not result.exists():
            return "error", done.stderr.strip().splitlines()[-1]
        said = next(iter(json.loads(result.read_text())["diagnosis"]), "")
    if done.returncode == 0:
        return "same numbers", ""
    if "DOES NOT RUN" in done.stdout:
        return "refused", re.search(r"DOES NOT RUN: (.*)", done.stdout)[1]
    says = getattr(fault, "says", None) or rf"\b{re.escape(fault.module)}\b"
    first = re.split(r"\. (?=[A-Z])", said)[0]
    return "named" if re.search(says, first) else "found", said


def main(chosen: list[str]) -> None:
    from torchtitan_faults import plans, upstream

    for module in (plans, upstream):
        short, verdicts = module.__name__.rpartition(".")[2], []
        for name, fault in module.ALTERED.items():
            if chosen and name not in chosen:
                continue
            begin = time.monotonic()
            verdict, said = judge(short, name, fault)
            verdicts.append(verdict)
            print(f"{name}: {verdict} ({time.monotonic() - begin:.0f} s) {said}", flush=True)
        differ = [one for one in verdicts if one in ("named", "found", "same numbers", "error")]
        print(
            f"{short}: {verdicts.count('named')} of {len(differ)} named, "
            f"{verdicts.count('refused')} refused by TorchTitan"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

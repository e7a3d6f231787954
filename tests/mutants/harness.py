"""Apply wrong edits of the library to a scratch copy, one at a time, and run `titanlite verify`.

    python tests/mutants/harness.py [NAME ...]     judge some mutants, or all, and print the score
    python tests/mutants/harness.py --unseen       the edits that verify was not developed with
    python tests/mutants/harness.py --same         judge the edits that change no number
    python tests/mutants/harness.py --threads ...  the same on ranks that are threads

A mutant affects both the plan and its reference, like a bug in a library. It is found if verify
does not agree. It is named if the first sentence of the diagnosis has the module or axis and the
kind of error, which the pattern `says` matches. A refactoring changes no number and must agree.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 240
LIBRARY = ("titanlite", "models")
BASE: dict[str, dict[str, Any]] = {
    "model": {"flavor": "debug"},
    "training": {"dataset": "synthetic", "local_batch_size": 4, "global_batch_size": 8},
    "lr_scheduler": {"warmup_steps": 2},
    "activation_checkpoint": {"mode": "none"},
    "sampling": {"num_samples": 0},
}


@dataclass(frozen=True)
class Edit:
    """One change of one file, which must contain `old` exactly once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A wrong edit, the job that exposes it, and the diagnosis that verify must give."""

    name: str
    kind: str
    """The part of the library that is wrong: TP, SP, CP, PP, FSDP, HSDP, DDP, accumulation, ..."""
    edits: tuple[Edit, ...]
    job: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Sections of the job, merged over BASE."""
    says: str = ""
    """A pattern for the first sentence of the diagnosis; "" if verify cannot name it yet."""
    steps: int = 5
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The result of verify for a mutant."""

    name: str
    status: int
    """Exit status: 0 agrees, 1 differs or does not run, 2 bad input."""
    cause: str
    findings: tuple[str, ...]

    @property
    def is_found(self) -> bool:
        return self.status == 1

    def is_named(self, mutant: Mutant) -> bool:
        is_said = bool(mutant.says) and not self.cause.startswith("unexplained")
        return self.is_found and is_said and bool(re.search(mutant.says, self.cause))


def unseen() -> list[Mutant]:
    """The wrong edits of unseen.json."""
    found = json.loads((Path(__file__).parent / "unseen.json").read_text(encoding="utf-8"))
    for one in found:
        one["edits"] = tuple(
            Edit(edit["file"], "\n".join(edit["old"]), "\n".join(edit["new"]))
            for edit in one["edits"]
        )
    return [Mutant(**one) for one in found]


def judge(mutant: Mutant) -> Verdict:
    """Apply a mutant to a copy of the library, verify its job there, and read the diagnosis."""
    with edited(mutant.edits) as folder:
        sections = {s: BASE.get(s, {}) | mutant.job.get(s, {}) for s in {*BASE, *mutant.job}}
        job, result = folder / "job.toml", folder / "result.json"
        job.write_text("".join(_toml(sections)), encoding="utf-8")
        words = ["verify", str(job), f"--steps={mutant.steps}", f"--json={result}", *mutant.options]
        done = subprocess.run(
            [sys.executable, "-m", "titanlite", *words],
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        findings = tuple(done.stderr.strip().splitlines()[-1:])
        if result.exists():
            findings = tuple(json.loads(result.read_text(encoding="utf-8"))["diagnosis"])
        return Verdict(mutant.name, done.returncode, next(iter(findings), ""), findings)


@contextlib.contextmanager
def edited(edits: Iterable[Edit], parts: Iterable[str] = LIBRARY) -> Iterator[Path]:
    """A scratch folder with a copy of these parts of the repository, and the edits applied."""
    with tempfile.TemporaryDirectory(prefix="titanlite-mutant-") as name:
        folder = Path(name)
        for part in parts:
            if (ROOT / part).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=ignored)
            else:
                shutil.copy(ROOT / part, folder / part)
        for edit in edits:
            _apply(folder, edit)
        yield folder


def environment(folder: Path) -> dict[str, str]:
    """The environment of a process that imports the library from `folder`."""
    return {
        **os.environ,
        "PYTHONPATH": f"{folder}:{Path(__file__).parent}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _apply(folder: Path, edit: Edit) -> None:
    path = folder / edit.file
    text = path.read_text(encoding="utf-8")
    count = text.count(edit.old)
    assert count == 1, f"{edit.file}: {edit.old!r} occurs {count} times"
    path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


def _toml(sections: dict[str, dict[str, Any]]) -> Iterator[str]:
    for section, values in sections.items():
        yield f"[{section}]\n"
        for key, value in values.items():
            yield f"{key} = {json.dumps(value)}\n"


def main(names: Sequence[str]) -> int:
    """Judge mutants and print the result of each; returns 0 if all are found."""
    from mutants import MUTANTS, REFACTORINGS

    if "--unseen" in names:
        names = [name for name in names if name != "--unseen"]
        MUTANTS[:] = unseen()
    if "--threads" in names:
        names = [name for name in names if name != "--threads"]
        MUTANTS[:], REFACTORINGS[:] = (
            [replace(one, options=(*one.options, "--threads")) for one in of_kind]
            for of_kind in (MUTANTS, REFACTORINGS)
        )
    if names == ["--same"]:
        unlike = [(m.name, judge(m)) for m in REFACTORINGS]
        for name, verdict in unlike:
            print("agrees" if verdict.status == 0 else "ALARM ", name, verdict.cause, flush=True)
        return int(any(verdict.status for _, verdict in unlike))
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    found = named = 0
    for mutant in chosen:
        verdict = judge(mutant)
        is_named = verdict.is_named(mutant)
        found, named = found + verdict.is_found, named + is_named
        word = "named" if is_named else "found" if verdict.is_found else "MISSED"
        print(f"{word:6}  {mutant.kind:12}  {mutant.name}: {verdict.cause}", flush=True)
    print(f"{found} of {len(chosen)} found, {named} named")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

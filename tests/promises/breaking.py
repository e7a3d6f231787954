"""Break one promise of the docs at a time in a scratch copy, and run the tests that hold it.

    python tests/promises/breaking.py [NAME ...]    judge some promises, or all, and print the score

A promise is caught if a test fails under its edit. The tests are those that a developer would name
for the page: they belong to the ordinary suite. An edit must leave the library importable, so a
failure at import does not count.
"""

import ast
import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.harness import LIBRARY, ROOT, Edit, edited, environment

SECONDS = 300
PARTS = (*LIBRARY, "tests", "docs", "configs", "train.py", "README.md", "pyproject.toml", ".ci")
"""What the tests read: the library, themselves, and the pages whose code they run."""
NOT_COUNTED = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError")
"""Errors of an edit that is not a fault of the library but nonsense."""
PASSED, FAILED = 0, 1
"""pytest's exit statuses that are a verdict."""


@dataclass(frozen=True)
class Break:
    """An edit of one definition, a function, a class or a constant, which has `old` exactly once.

    `function` is its qualified name, such as "Trainer.step"; no other definition of that name has
    `old`.
    """

    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Promise:
    """A sentence of the docs, an edit that breaks what it says, and the tests that hold it."""

    name: str
    page: str
    sentence: str
    """A part of the page's text; line breaks count as spaces."""
    edit: Break
    tests: tuple[str, ...]
    """Files or node ids of tests, relative to tests/."""


@dataclass(frozen=True)
class Verdict:
    """What the tests say about a broken promise."""

    name: str
    status: int | None
    """pytest's exit status; None if it did not end in time."""
    said: str
    """The line of the first failure, or what went wrong."""

    @property
    def is_caught(self) -> bool:
        return self.status == FAILED and not any(f" {kind}" in self.said for kind in NOT_COUNTED)


def as_edit(edit: Break) -> Edit:
    """The edit of a file; raises AssertionError if there is not exactly one place for it."""
    places = [
        (path, source)
        for path, text in _sources().items()
        if edit.old in text
        for name, source in _definitions(path)
        if name == edit.function and edit.old in source
    ]
    files = ", ".join(str(path) for path, _ in places) or "no file"
    assert len(places) == 1, f"{edit.function} with {edit.old!r} is in {files}"
    ((path, source),) = places
    count = source.count(edit.old)
    assert count == 1, f"{edit.function} of {path}: {edit.old!r} occurs {count} times"
    return Edit(str(path), source, source.replace(edit.old, edit.new))


@functools.cache
def _sources() -> dict[Path, str]:
    """The text of each file of the library, by its path in the repository."""
    paths = [path for part in LIBRARY for path in sorted((ROOT / part).rglob("*.py"))]
    # titanlite/models is a link to models/.
    own = [path for path in paths if not path.is_relative_to(ROOT / "titanlite" / "models")]
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in own}


@functools.cache
def _definitions(path: Path) -> list[tuple[str, str]]:
    """The qualified name and the source of each function, class and constant of a file."""
    text = _sources()[path]
    lines = text.splitlines(keepends=True)
    return [
        (name, "".join(lines[node.lineno - 1 : node.end_lineno]))
        for name, node in _statements(ast.parse(text), "")
    ]


def _statements(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _statements(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name):
            yield prefix + child.targets[0].id, child
        elif isinstance(child, ast.If | ast.With | ast.Try):
            yield from _statements(child, prefix)


def is_on_page(promise: Promise) -> bool:
    """Whether the page still has the sentence."""
    text = (ROOT / promise.page).read_text(encoding="utf-8")
    return " ".join(promise.sentence.split()) in " ".join(text.split())


def judge(promise: Promise, seconds: float = SECONDS) -> Verdict:
    """Break the promise in a copy of the repository, and run its tests there until one fails."""
    edit = as_edit(promise.edit)
    with edited([edit], PARTS) as folder:
        module = edit.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = re.sub(r"^models\b", "titanlite.models", module)
        program = f"import titanlite.cli, titanlite.job, titanlite.run, {module}"
        status, text = _run(["-c", program], folder, seconds)
        if status != PASSED:
            return Verdict(promise.name, None, f"the edit breaks an import: {text[-500:]}")
        tests = [f"tests/{test}" for test in promise.tests]
        # Otherwise pytest runs a test whose file is named too at its place in the file.
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--keep-duplicates"]
        status, text = _run(["-m", "pytest", *options, *tests], folder, seconds)
        ends = {PASSED: "no test fails", None: f"the tests did not end within {seconds:g} s"}
        return Verdict(promise.name, status, ends.get(status) or _first_failure(text))


def _first_failure(text: str) -> str:
    """The test that failed and its error, in one line."""
    test = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    error = re.search(r"^E +(.*)", text, re.MULTILINE)
    if test is None or error is None:
        return text[-500:]
    return f"{test[1]}: {error[1]}"


def _run(arguments: Sequence[str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """The exit status and the output of Python; no process that it started is left."""
    output = folder / "output.txt"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # A broken library may leave ranks behind, in sessions of their own, too.
            for number in [process.pid, *_processes_of(folder)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()
    return status, output.read_text(encoding="utf-8", errors="replace")


def _processes_of(folder: Path) -> Iterator[int]:
    """The processes that import the library from `folder` (Linux; none elsewhere)."""
    for about in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"PYTHONPATH={folder}".encode() in about.read_bytes():
                yield int(about.parent.name)


def main(names: Sequence[str]) -> int:
    """Judge promises and print each result; returns 0 if all are caught."""
    from tests.promises.promises import PROMISES

    chosen = [promise for promise in PROMISES if not names or promise.name in names]
    caught = 0
    for promise in chosen:
        verdict = judge(promise)
        caught += verdict.is_caught
        word = "caught" if verdict.is_caught else "SURVIVES"
        print(f"{word:8}  {promise.page}, {promise.name}: {verdict.said}", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

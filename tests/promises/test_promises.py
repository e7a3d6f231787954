"""The tests notice when a promise of the docs is broken; see breaking.py.

A normal run checks that the lists are up to date. `make test-all` breaks each promise and runs the
tests that hold it, which takes half an hour or more; so it does with wrong edits of the two worlds.
"""

import pytest

from tests.mutants.harness import ROOT
from tests.promises.breaking import Promise, Verdict, as_edit, is_on_page, judge
from tests.promises.promises import FIRST_SURVIVORS, PROMISES
from tests.promises.worlds import OF_PROCESSES, OF_THREADS

NUMBER = 68
"""Sixty at first; a new page brings its own."""


# Pages that promise nothing of their own: lists, and how things work inside.
WITHOUT = {f"docs/{name}.md" for name in ("commands", "index", "verify_bugs", "verify_how")}


def name_of(promise: Promise) -> str:
    return promise.name


def test_every_page_has_a_promise() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    names = {promise.name for promise in PROMISES}
    assert len(PROMISES) == len(names) == NUMBER
    assert names >= set(FIRST_SURVIVORS)
    assert {promise.page for promise in PROMISES} == {*pages, "docs/lab/README.md"} - WITHOUT


@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_a_promise_is_in_the_docs_and_its_edit_in_the_code(promise: Promise) -> None:
    assert is_on_page(promise), f"{promise.page} no longer says: {promise.sentence}"
    edit = as_edit(promise.edit)
    compile(f"if True:\n{edit.new}" if edit.new[0].isspace() else edit.new, edit.file, "exec")
    for test in promise.tests:
        assert (ROOT / "tests" / test.partition("::")[0]).is_file(), f"there is no tests/{test}"


@pytest.mark.parametrize(
    ("status", "said", "is_caught"),
    [
        (0, "no test fails", False),
        (1, "tests/unit/test_cli.py::test_it: AssertionError: 1", True),
        (1, "tests/unit/test_cli.py::test_it: NameError: no such name", False),
        (1, "tests/unit/test_cli.py::test_it: ImportError: cannot import", False),
        (2, "tests/unit/test_cli.py: it has no tests", False),
        (None, "the tests did not end within 300 s", False),
    ],
)
def test_only_a_test_that_fails_counts(status: int | None, said: str, is_caught: bool) -> None:
    assert Verdict("a promise", status, said).is_caught == is_caught


@pytest.mark.slow
@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_a_broken_promise_is_caught(promise: Promise) -> None:
    verdict = judge(promise)
    assert verdict.is_caught, verdict.said


@pytest.mark.parametrize("edit", [*OF_THREADS, *OF_PROCESSES], ids=name_of)
def test_a_wrong_edit_of_a_world_fits_the_code(edit: Promise) -> None:
    as_edit(edit.edit)


@pytest.mark.slow
@pytest.mark.parametrize("edit", [*OF_THREADS, *OF_PROCESSES], ids=name_of)
def test_a_wrong_edit_of_a_world_is_caught(edit: Promise) -> None:
    verdict = judge(edit)
    assert verdict.is_caught, verdict.said

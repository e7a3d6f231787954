"""`titanlite verify` finds and names wrong edits of the library; see docs/verify.md.

A normal run judges three of them, on ranks that are threads, and each change of the code selects
others. `make test-all` judges all, on processes.
"""

from dataclasses import replace

import pytest
from harness import ROOT, Mutant, judge, unseen
from mutants import MUTANTS, REFACTORINGS

from titanlite.tools.verify.matrix import code_digest


def some(mutants: list[Mutant], number: int) -> list[Mutant]:
    """At most `number` mutants, on threads; which ones depends on a digest of the sources."""
    every = -(-len(mutants) // number)
    chosen = mutants[int(code_digest(), 16) % every :: every]
    return [replace(one, options=(*one.options, "--threads")) for one in chosen]


def check(mutant: Mutant) -> None:
    verdict = judge(mutant)
    said = "\n".join(verdict.findings)
    assert verdict.is_found, f"missed: {said}"
    assert not mutant.says or verdict.is_named(mutant), f"not named: {said}"


def check_same(refactoring: Mutant) -> None:
    verdict = judge(refactoring)
    assert verdict.status == 0, "\n".join(verdict.findings)


def name_of(mutant: Mutant) -> str:
    return mutant.name


def test_every_edit_fits_the_sources() -> None:
    texts: dict[str, str] = {}
    for mutant in [*MUTANTS, *REFACTORINGS, *unseen()]:
        for edit in mutant.edits:
            text = texts.setdefault(edit.file, (ROOT / edit.file).read_text())
            assert text.count(edit.old) == 1, f"{mutant.name}: {edit.file} lacks the old lines"
            # What does not compile is found on import, which proves nothing.
            compile(text.replace(edit.old, edit.new), edit.file, "exec")


@pytest.mark.parametrize("mutant", some(MUTANTS, 3), ids=name_of)
def test_a_wrong_edit_is_found_and_named(mutant: Mutant) -> None:
    check(mutant)


@pytest.mark.parametrize("refactoring", some(REFACTORINGS, 1), ids=name_of)
def test_an_edit_that_changes_no_number_agrees(refactoring: Mutant) -> None:
    check_same(refactoring)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=name_of)
def test_all_wrong_edits_are_found_and_named(mutant: Mutant) -> None:
    check(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("refactoring", REFACTORINGS, ids=name_of)
def test_all_edits_that_change_no_number_agree(refactoring: Mutant) -> None:
    check_same(refactoring)

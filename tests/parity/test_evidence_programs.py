"""The programs of docs/evidence: what compare says of those that its diagnosis was mended for."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import titanlite
from titanlite.tools.verify import Comparer

PROGRAMS = Path(__file__).parents[2] / "docs/evidence/programs"
CAUSES = json.loads((PROGRAMS.parent / "today.json").read_text())
"""Program -> a pattern of what its diagnosis says."""


# The others take longer.
FAST = {
    *("faulty/diloco_sign", "faulty/muon_on_local_shards", "faulty/vocab_parallel_padding_index"),
    *("faulty_2/ema_weights_not_restored", "faulty_2/gan_keeps_generator_gradients"),
    *("faulty_2/group_norm_of_own_patch", "faulty_2/observer_of_own_rank"),
    *("faulty_2/sampler_repeats_a_sample", "faulty_2/zero_loses_parameter_groups"),
}
AGREE = (
    *("correct_2/gradients_reduced_to_their_owner", "correct_2/sparse_embedding_under_ddp"),
    *(
        "correct_4/adafactor_with_reduced_means",
        "correct_5/scaled_gradients_clipped_by_scaled_norm",
    ),
)


def said_of(program: str, comparer: Comparer, monkeypatch, capsys) -> str:
    monkeypatch.setattr(titanlite, "compare", comparer.compare)
    runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=[pytest.mark.slow] * (p not in FAST)) for p in CAUSES]
)
def test_the_cause_is_named(program, comparer, monkeypatch, capsys):
    said = said_of(program, comparer, monkeypatch, capsys)
    assert re.search(f"likely cause: .*{CAUSES[program]}", said), said


@pytest.mark.parametrize("program", AGREE)
def test_a_correct_program_agrees(program, comparer, monkeypatch, capsys):
    assert "AGREES" in said_of(program, comparer, monkeypatch, capsys)

"""The programs of docs/evidence: what compare says of those that its diagnosis was mended for."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import titanlite
from titanlite.tools.verify import Comparer

PROGRAMS = Path(__file__).parents[2] / "docs/evidence/programs"
CAUSES = {
    "faulty/balance_loss_discards_all_reduce": "the result of .*:24 .* only the sum over dp is",
    "faulty/clipped_after_every_backward": "all 15 gradients are sums over the microbatches",
    "faulty/cp_labels_shifted_per_rank": "loss is .*another result .*:58 .* has rows or columns",
    "faulty/diloco_sign": "change of these weights is -1 times",
    "faulty/muon_on_local_shards": "its shard is taken for the whole tensor",
    "faulty/no_sync_wrong_microbatch": "the part of microbatch 1 of rank 1 is missing, and the oth",
    "faulty/query_norm_over_local_heads": "a value of the same line, .* only the mean over tp is",
    "faulty/vocab_parallel_padding_index": "differs only in row 13 of 20, .* on rank 1 only",
    "faulty_2/ema_weights_not_restored": "changed before the forward pass of step 3, on rank 0",
    "faulty_2/gan_keeps_generator_gradients": "add to them 2 times as often as on one process",
    "faulty_2/group_norm_of_own_patch": "norm1 .*module reads only this rank.s part .* nothing",
    "faulty_2/last_window_divided_by_all_steps": "step 3 has 2 microbatches, and each counts 1/4",
    "faulty_2/observer_of_own_rank": "x.amin.* only the minimum over dp is right",
    "faulty_2/sampler_repeats_a_sample": "row 0 is read by several, the others by one",
    "faulty_2/zero_loses_parameter_groups": "-0.001 times the weights .* the weight decay",
}
"""Program -> what its diagnosis must say."""


SLOW = {
    *("faulty/balance_loss_discards_all_reduce", "faulty/clipped_after_every_backward"),
    *("faulty/cp_labels_shifted_per_rank", "faulty/no_sync_wrong_microbatch"),
    *("faulty/query_norm_over_local_heads", "faulty_2/last_window_divided_by_all_steps"),
}


@pytest.fixture(scope="module")
def comparer() -> Iterator[Comparer]:
    with Comparer(threads=True) as comparer:
        yield comparer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "program", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in CAUSES]
)
def test_the_cause_is_named(program, comparer, monkeypatch, capsys):
    monkeypatch.setattr(titanlite, "compare", comparer.compare)
    runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(f"likely cause: .*{CAUSES[program]}", said), said

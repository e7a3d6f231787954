"""The models of docs/examples agree with one process under plans."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite.config import read_job
from titanlite.tools.verify.verify import Verifier

FOLDER = Path(__file__).parents[2] / "docs/examples"
TP, SHARD, PP, CP = (
    {f"parallelism.{axis}_degree": 2}
    for axis in ("tensor_parallel", "data_parallel_shard", "pipeline_parallel", "context_parallel")
)


@pytest.fixture(scope="module")
def example_verifier() -> Iterator[Verifier]:
    sys.path.insert(0, str(FOLDER / "seq2seq"))
    try:
        with Verifier(timeout_seconds=200) as verifier:
            yield verifier
    finally:
        sys.path.remove(str(FOLDER / "seq2seq"))


@pytest.mark.parametrize(
    "plan",
    [
        {**PP, **CP},
        pytest.param({**TP, **SHARD}, marks=pytest.mark.slow),
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in (TP, SHARD, PP, CP)),
    ],
    ids=str,
)
def test_an_encoder_decoder_agrees(example_verifier: Verifier, plan: dict[str, Any]) -> None:
    sys.modules.pop("seq2seq", None)  # what it registers is gone after each test
    words = [f"--job.config_file={FOLDER / 'seq2seq/seq2seq.toml'}"]
    words += [f"--{key}={value}" for key, value in plan.items()]
    found = example_verifier.verify(read_job(words).config, steps=2)
    assert found.agrees, found.findings

"""Published steps against predicted ones, on the figures of the shipped hardware files."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tests.benchmarks import published_llama
from tests.benchmarks.published_llama import FITTED, H200, PAPER, PREDICTED, RINGS, Llama
from tests.benchmarks.published_megatron import (
    KORTHIKANTI,
    KORTHIKANTI_ACTIVATIONS,
    NARAYANAN,
    flops,
    kept_activation_bytes,
    korthikanti_runs,
    predict_narayanan,
    step_seconds,
)
from titanlite.plan.hardware import load_hardware

MEAN, WORST = 0.10, 0.20
A100 = load_hardware("a100")


def errors(pairs: Iterable[tuple[float, float]]) -> list[float]:
    return [abs(predicted / published - 1) for published, predicted in pairs]


def errors_of(rows: Iterable[Llama]) -> list[float]:
    return errors((row.published, published_llama.predict(row)) for row in rows)


def assert_close(found: list[float]) -> None:
    assert statistics.fmean(found) < MEAN, found
    assert max(found) < WORST, found


def test_some_rows_of_each_device_are_close() -> None:
    run, _, selective = KORTHIKANTI[0]
    assert step_seconds(replace(run, recomputes=False), A100) == pytest.approx(selective, rel=0.05)
    largest, measured = NARAYANAN[-1]
    tflops = flops(largest) / step_seconds(largest, A100) / largest.gpus / 1e12
    assert tflops == pytest.approx(measured, rel=0.1)
    # The float8 rows of H100 and H200 share one trace, and so do the paper's two without CP.
    float8 = [row for row in PREDICTED if row.name.startswith("8B") and row.seq_len == 8192]
    assert len(float8) == 4
    assert_close(errors_of([*float8, *PAPER[:2]]))


def test_activation_memory_is_that_of_korthikanti() -> None:
    run = KORTHIKANTI[0][0]
    for saves_memory, published in zip((False, True), KORTHIKANTI_ACTIVATIONS["22B"], strict=True):
        found = kept_activation_bytes(run, saves_memory=saves_memory) / 2**30
        assert found == pytest.approx(published, rel=0.01)


@pytest.mark.slow
def test_activation_memory_of_pipelines_is_that_of_korthikanti() -> None:
    for run, *_ in KORTHIKANTI:
        for saves_memory, published in enumerate(KORTHIKANTI_ACTIVATIONS[run.name]):
            found = kept_activation_bytes(run, saves_memory=bool(saves_memory)) / 2**30
            assert found == pytest.approx(published, rel=0.01)


@pytest.mark.slow
def test_the_a100_predicts_narayanan_from_korthikanti() -> None:
    fitted = errors((seconds, step_seconds(run, A100)) for run, seconds in korthikanti_runs())
    assert max(fitted) < 0.05
    assert_close(errors((m, predict_narayanan(run, A100)[1]) for run, m in NARAYANAN))


@pytest.mark.slow
def test_the_h100_predicts_all_llamas_from_the_small_one_in_bfloat16() -> None:
    assert max(errors_of(FITTED)) < 0.05
    assert_close(errors_of(PREDICTED))
    # What was fitted for one GPU serves another.
    assert_close(errors_of(H200))


@pytest.mark.slow
def test_torchtitans_context_parallelism_is_slower_than_a_balanced_ring() -> None:
    for row in RINGS:
        balanced = published_llama.predict(row)
        contiguous = published_llama.predict(published_llama.unbalanced(row))
        assert 0.99 * contiguous < row.published < balanced, row.name

"""Published step times against predicted ones, on the figures of the shipped hardware files."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from tests.benchmarks.published import (
    KORTHIKANTI,
    LLAMA_FITTED,
    LLAMA_PREDICTED,
    NARAYANAN,
    flops,
    korthikanti_runs,
    predict_llama,
    predict_narayanan,
    step_seconds,
)
from titanlite.plan.hardware import load_hardware

MEAN, WORST = 0.10, 0.20
A100 = load_hardware("a100")


def test_one_fitted_and_one_predicted_row_are_close() -> None:
    run, _, selective = KORTHIKANTI[0]
    assert step_seconds(replace(run, recomputes=False), A100) == pytest.approx(selective, rel=0.05)
    largest, measured = NARAYANAN[-1]
    tflops = flops(largest) / step_seconds(largest, A100) / largest.gpus / 1e12
    assert tflops == pytest.approx(measured, rel=0.1)


def errors(pairs: list[tuple[float, float]]) -> list[float]:
    return [abs(predicted / measured - 1) for measured, predicted in pairs]


@pytest.mark.slow
def test_the_a100_predicts_narayanan_from_korthikanti() -> None:
    fitted = errors([(seconds, step_seconds(run, A100)) for run, seconds in korthikanti_runs()])
    assert max(fitted) < 0.05
    predicted = errors([(m, predict_narayanan(run, A100)[1]) for run, m in NARAYANAN])
    assert statistics.fmean(predicted) < MEAN
    assert max(predicted) < WORST


@pytest.mark.slow
def test_the_h100_predicts_the_large_llamas_from_the_small_one() -> None:
    fitted = errors([(row.published, predict_llama(row)) for row in LLAMA_FITTED])
    assert max(fitted) < 0.05
    predicted = errors([(row.published, predict_llama(row)) for row in LLAMA_PREDICTED])
    assert statistics.fmean(predicted) < MEAN
    assert max(predicted) < WORST

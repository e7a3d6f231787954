"""Fixtures shared by the parity tests."""

import sys
from collections.abc import Iterator

import pytest

from titanlite import models
from titanlite.data.catalog import DATASETS
from titanlite.verify.verify import Verifier


@pytest.fixture(autouse=True, scope="module")
def _models_of_module() -> Iterator[None]:
    """Unregister models that a module's fixtures have registered, after its tests."""
    before = dict(models.MODELS)
    yield
    models.MODELS.clear()
    models.MODELS.update(before)


@pytest.fixture(autouse=True)
def _own_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unregister models and data sets that a test has registered, after the test."""
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    datasets = dict(DATASETS)
    yield
    DATASETS.clear()
    DATASETS.update(datasets)
    for name in [
        name
        for name in sys.modules
        if name.startswith(
            (
                *("plain_model", "odd_model", "rotary_model", "tied_model", "wide_model"),
                *("lora_model", "packed_documents", "biased_experts", "uncovered", "bigram"),
            )
        )
    ]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    """One Verifier for all tests of small plans: most take less time than starting ranks."""
    with Verifier(timeout_seconds=120) as verifier:
        yield verifier

"""What the parity tests share."""

import sys
from collections.abc import Iterator

import pytest

from titanlite import models
from titanlite.data.catalog import DATASETS
from titanlite.verify.verify import Verifier


@pytest.fixture(autouse=True, scope="module")
def _models_of_module() -> Iterator[None]:
    """A model that a fixture of a module registers is known to that module alone."""
    before = dict(models.MODELS)
    yield
    models.MODELS.clear()
    models.MODELS.update(before)


@pytest.fixture(autouse=True)
def _own_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model or a data set that a test registers is known to that test alone."""
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    datasets = dict(DATASETS)
    yield
    DATASETS.clear()
    DATASETS.update(datasets)
    for name in [
        name
        for name in sys.modules
        if name.startswith(("plain_model", "odd_model", "rotary_model", "wide_model"))
    ]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    """One for all that verify small plans: starting ranks takes longer than most of them."""
    with Verifier(timeout_seconds=120) as verifier:
        yield verifier

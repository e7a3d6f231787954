"""What the parity tests share."""

import sys
from collections.abc import Iterator

import pytest

import models


@pytest.fixture(autouse=True)
def _own_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A model that a test registers is known to that test alone."""
    monkeypatch.setattr(models, "MODELS", dict(models.MODELS))
    yield
    for name in [name for name in sys.modules if name.startswith(("plain_model", "odd_model"))]:
        del sys.modules[name]

"""Fixtures shared by the parity tests."""

import sys
from collections.abc import Iterator

import pytest

from titanlite.registry import MODELS
from titanlite.tools.verify.verify import Verifier


@pytest.fixture(autouse=True, scope="module")
def _models_of_module() -> Iterator[None]:
    """Unregister models that a module's fixtures have registered, after its tests."""
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


@pytest.fixture(autouse=True)
def _own_models() -> Iterator[None]:
    """Forget the modules that a test has imported to register models: the next imports its own."""
    yield
    for name in [
        name
        for name in sys.modules
        if name.startswith(
            (
                *("plain_model", "odd_model", "rotary_model", "tied_model", "wide_model"),
                *("lora_model", "packed_documents", "biased_experts", "uncovered"),
            )
        )
    ]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def verifier() -> Iterator[Verifier]:
    """One Verifier for all tests of small plans: most take less time than starting ranks."""
    with Verifier(timeout_seconds=120, threads=True) as verifier:
        yield verifier

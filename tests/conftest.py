"""Settings shared by all tests."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from titanlite.ranks.fork_server import prepare_environment

# As in a command, before torch is imported: threads of OpenMP that wait sleep. They would take half
# of the time of ranks that are threads.
prepare_environment()

import titanlite.register  # noqa: E402, F401 (what is built in is there before any test)
from titanlite.registry import REGISTRIES  # noqa: E402

# No deadline: the time of an example depends more on the load of the machine than on the code.
settings.register_profile("titanlite", deadline=None)
settings.load_profile("titanlite")


@pytest.fixture(autouse=True)
def _registries_of_the_test() -> Iterator[None]:
    """Unregister what a test has registered, after the test."""
    before = [(dict(one), dict(one.registered_by)) for one in REGISTRIES.values()]
    yield
    for one, (specs, registered_by) in zip(REGISTRIES.values(), before, strict=True):
        one.clear()
        one.update(specs)
        one.registered_by = registered_by

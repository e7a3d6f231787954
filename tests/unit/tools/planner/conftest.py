"""What tests of the planner share."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest

from titanlite.tools.planner import search


@pytest.fixture
def search_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search evaluates its plans here, not in workers."""

    class Here(nullcontext[None]):
        def __init__(self, _: int, __: object, ___: object, settings: tuple[Any, ...]) -> None:
            super().__init__()
            config, hardware, compiles, caches = settings
            evaluator = search.Evaluator(config, hardware, is_compiled=compiles, use_cache=caches)
            monkeypatch.setattr(search, "_evaluator", evaluator)

        def submit(self, function: Callable[..., object], *given: object) -> Future[object]:
            done: Future[object] = Future()
            done.set_result(function(*given))
            return done

        map = map

    monkeypatch.setattr(search, "ProcessPoolExecutor", Here)

"""Fixtures of pytest that fail where parallel code, or a job, differs from one process.

    def test_fsdp(assert_equivalent):
        assert_equivalent(Model, with_fsdp, batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

    def test_job(verify_job):
        verify_job("job.toml", shrink=True)

pytest imports this module in every suite of an environment that has titanlite, so it imports what
it needs at the first use of a fixture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from titanlite.config import JobConfig
    from titanlite.tools.verify.from_python import VerifyResult
    from titanlite.tools.verify.program.result import Comparison

R = TypeVar("R", "Comparison", "VerifyResult")

WORLDS = ("threads", "processes")
AS_PROCESSES = {"threads": False, "timeout_seconds": 60}  # Processes that hang tell nothing more.
OF_THREADS = (
    "the ranks differ as threads, but agree as processes: they share what a process has once, such "
    "as a global variable or an attribute of a class. Keep it in an object of the rank, or run "
    "pytest with --titanlite-ranks=processes"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option `--titanlite-ranks`, and `titanlite_ranks` in the configuration file."""
    text = "what the ranks of titanlite's fixtures are: threads of the test process, or processes"
    group = parser.getgroup("titanlite")
    group.addoption("--titanlite-ranks", choices=WORLDS, help=f"{text} (default: threads)")
    parser.addini("titanlite_ranks", f"{text} (default: threads)", default="threads")


@pytest.fixture(scope="session")
def assert_equivalent(request: pytest.FixtureRequest) -> Iterator[Callable[..., Comparison]]:
    """`titanlite.compare`, which fails with the likely cause unless the parallel code agrees.

    All comparisons of the session share one Comparer, unless one has `threads`, `max_ranks` or
    `timeout_seconds` of its own.
    """
    from titanlite.tools.verify.program.comparison import OF_THE_RANKS, Comparer, compare

    world = {"threads": _are_threads(request.config)}
    with Comparer(**world) as comparer:

        def check(
            reference: Callable[[], Any], parallel: Callable[..., Any], **options: Any
        ) -> Comparison:
            __tracebackhide__ = True
            given = {**world, **options}
            one = compare if options.keys() & OF_THE_RANKS else comparer.compare
            run = partial(one, reference, parallel, **(given if one is compare else options))
            as_processes = partial(compare, reference, parallel, **given | AS_PROCESSES)
            return _agreeing(run, as_processes if given["threads"] else None)

        yield check


@pytest.fixture(scope="session")
def verify_job(request: pytest.FixtureRequest) -> Callable[..., VerifyResult]:
    """`titanlite.verify`, which fails with the likely cause unless the job's plan agrees."""
    from titanlite.tools.verify.from_python import verify

    world = {"threads": _are_threads(request.config)}

    def check(
        job: JobConfig | Mapping[str, Mapping[str, Any]] | str | Path, **options: Any
    ) -> VerifyResult:
        __tracebackhide__ = True
        return _agreeing(lambda: verify(job, **{**world, **options}))

    return check


def _are_threads(config: pytest.Config) -> bool:
    chosen = config.getoption("--titanlite-ranks") or config.getini("titanlite_ranks")
    if chosen not in WORLDS:
        raise pytest.UsageError(f"titanlite_ranks: {chosen!r} is neither {' nor '.join(WORLDS)}")
    return bool(chosen == "threads")


def _agreeing(run: Callable[[], R], as_processes: Callable[[], R] | None = None) -> R:
    """What `run` returns; raises AssertionError with its cause and its text unless it agrees.

    What differs as threads runs again as processes: that may be the cause.

    The traceback of an error has no frames of titanlite: a test's author looks for the test's.
    """
    from titanlite.errors import TitanliteError

    __tracebackhide__ = True
    try:
        found = run()
    except TitanliteError as error:
        raise error.with_traceback(None) from None
    if not found.agrees:
        cause = OF_THREADS if as_processes and _agrees(as_processes) else found.cause
        raise AssertionError(f"{cause}\n\n{found}")
    return found


def _agrees(run: Callable[[], R]) -> bool:
    from titanlite.errors import TitanliteError

    with contextlib.suppress(TitanliteError):
        return run().agrees
    return False

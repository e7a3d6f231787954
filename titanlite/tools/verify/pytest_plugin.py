"""Fixtures of pytest that fail where parallel code, or a job, differs from one process.

    def test_fsdp(assert_equivalent):
        assert_equivalent(Model, with_fsdp, batches=batches, loss=loss, ranks={"dp": 2}, split="dp")

    def test_job(verify_job):
        verify_job("job.toml", shrink=True)

pytest imports this module in every suite of an environment that has titanlite, so it imports what
it needs at the first use of a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from titanlite.config import JobConfig, Reading
    from titanlite.tools.verify.program.comparison import Comparison
    from titanlite.tools.verify.result import Result, Verification

R = TypeVar("R", bound="Result")

WORLDS = ("threads", "processes")


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
            if options.keys() & OF_THE_RANKS:
                return _agreeing(lambda: compare(reference, parallel, **{**world, **options}), str)
            return _agreeing(lambda: comparer.compare(reference, parallel, **options), str)

        yield check


@pytest.fixture(scope="session")
def verify_job(request: pytest.FixtureRequest) -> Iterator[Callable[..., Verification]]:
    """`titanlite verify`, which fails with the likely cause unless the job's plan agrees.

    The first argument is a JobConfig, a dict of sections, or the path of a TOML file. `overrides`
    maps keys ("section.key") to values; `shrink`, `steps` and `dtype` are the command's options.
    """
    from titanlite.config import read_values
    from titanlite.start import check_start
    from titanlite.tools.verify.jobs import DEFAULT_STEPS
    from titanlite.tools.verify.report import format_header, format_verification
    from titanlite.tools.verify.shrink import shrink_job
    from titanlite.tools.verify.verify import Verifier

    threads = _are_threads(request.config)
    verifiers: dict[Any, Verifier] = {}
    with ExitStack() as exits:

        def check(
            job: JobConfig | Mapping[str, Mapping[str, Any]] | str | Path,
            *,
            overrides: Mapping[str, Any] | None = None,
            shrink: bool = False,
            steps: int = DEFAULT_STEPS,
            dtype: str = "float64",
        ) -> Verification:
            __tracebackhide__ = True
            shrunk: list[str] = []

            def read(changes: Mapping[str, Any]) -> Reading:
                return read_values(job, {**(overrides or {}), **changes})

            def verify() -> Verification:
                reading, shrunk[:] = shrink_job(read) if shrink else (read({}), [])
                start = check_start(reading, threads=threads)
                key = start.device_type, start.threads, start.job.config.job.max_local_ranks
                if key not in verifiers:
                    device_type, are_threads, most = key
                    one = Verifier(device_type, max_ranks=most, threads=are_threads)
                    verifiers[key] = exits.enter_context(one)
                return verifiers[key].verify(start.job, steps=steps, dtype=dtype, reloads=True)

            def show(found: Verification) -> str:
                source = str(job) if isinstance(job, (str, Path)) else "job"
                header = format_header(found, source, shrunk)
                rank_traceback = found.error.rank_traceback if found.error else ""
                return f"{header}\n\n{format_verification(found)}\n\n{rank_traceback}".rstrip()

            return _agreeing(verify, show)

        yield check


def _are_threads(config: pytest.Config) -> bool:
    chosen = config.getoption("--titanlite-ranks") or config.getini("titanlite_ranks")
    if chosen not in WORLDS:
        raise pytest.UsageError(f"titanlite_ranks: {chosen!r} is neither {' nor '.join(WORLDS)}")
    return bool(chosen == "threads")


def _agreeing(run: Callable[[], R], show: Callable[[R], str]) -> R:
    """What `run` returns; raises AssertionError with its cause and its text unless it agrees.

    The traceback of an error has no frames of titanlite: a test's author looks for the test's.
    """
    from titanlite.errors import TitanliteError

    __tracebackhide__ = True
    try:
        found = run()
    except TitanliteError as error:
        raise error.with_traceback(None) from None
    if not found.agrees:
        raise AssertionError(f"{found.cause}\n\n{show(found)}")
    return found

"""Under torchrun, every machine's own log says why its ranks end: in one line, not once a rank."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.errors import ConfigError
from titanlite.ranks import crash_state, watch
from titanlite.ranks.launch import Place
from titanlite.ranks.watch import Watch

LOST = dist.DistNetworkError("Connection closed by peer")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of several machines in one process, which does not end with them."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(watch, "END_SECONDS", 0.1)
    monkeypatch.setattr(watch.os, "_exit", lambda status: None)
    monkeypatch.setattr(crash_state.ProcessRecord, "kill", lambda self: None)
    monkeypatch.setattr(crash_state.ProcessRecord, "state", lambda self: "")
    # Each has its own main thread.
    monkeypatch.setattr(watch, "handling", lambda *_: contextlib.nullcontext())


@contextlib.contextmanager
def ranks(store: Any, *numbers: int) -> Iterator[list[Watch]]:
    """The watches of ranks of a world of two machines with two ranks each."""
    watches = [Watch(Place(n, 4, n % 2, 2, rendezvous="env://"), store, 60) for n in numbers]
    try:
        yield watches
    finally:
        for one in watches:
            one.close()


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that wait for each other."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        found[index] = calls[index]()

    threads = [threading.Thread(target=run, args=[index]) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that begin with a rank: what a report lists is indented."""
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("rank ")]


def test_the_machine_without_the_report_says_so_once(capfd: pytest.CaptureFixture[str]) -> None:
    with ranks(dist.HashStore(), 0, 1, 2, 3) as watches:
        # The main threads of ranks 1 and 3 are blocked: their watches end them.
        assert at_once(*(lambda one=one: one.explain(LOST) for one in watches[::2])) == [True, True]
        for one in watches:
            assert one._over.wait(10)
    lines = said(capfd)
    # The report itself, on the machine of the rank that was first, and a line on the other.
    assert len(lines) == 2, lines
    (report,) = [line for line in lines if "the run has stopped" not in line]
    (line,) = [line for line in lines if line is not report]
    assert line.partition(": the run has stopped: ")[2] == report.replace(": ", " ", 1)


def test_an_error_of_a_rank_prints_on_the_other_machine(capfd: pytest.CaptureFixture[str]) -> None:
    with ranks(dist.HashStore(), 0, 1, 2, 3) as watches:
        assert not watches[3].explain(ValueError("no such table"))
        found = at_once(*(lambda one=one: one.explain(LOST) for one in watches[:3]))
        assert found == [True, True, True]
    # Its own machine has its traceback, which Python prints.
    (line,) = said(capfd)
    assert line in {
        f"rank {rank}: the run has stopped: rank 3 failed with ValueError: no such table"
        for rank in (0, 1)
    }


def test_a_mistake_that_all_ranks_find_is_printed_on_each_machine() -> None:
    with ranks(dist.HashStore(), 0, 1, 2, 3) as watches:
        errors = [ConfigError("metrics.enable_wandb: no") for _ in watches]
        for one, error in zip(watches[::-1], errors[::-1], strict=True):
            one.explain(error)
        assert [error.is_printed_here for error in errors] == [False, True, False, True]


class Cable:
    """A store on another machine: after `cut`, what is asked of it does not return."""

    def __init__(self) -> None:
        self.store, self.is_cut, self.is_mended = dist.HashStore(), False, threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def ask(*arguments: Any) -> Any:
            if self.is_cut:
                self.is_mended.wait()
                raise dist.DistNetworkError("Connection timed out")
            return method(*arguments)

        return ask


def test_a_machine_whose_cable_is_cut_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    cable = Cable()
    with ranks(cable, 2, 3) as watches:
        cable.is_cut = True
        timed_out = dist.DistBackendError("Timed out waiting 5000ms for recv\nfrom rank 1")
        found = at_once(*(lambda one=one: one.explain(timed_out) for one in watches))
        assert found == [True, True]
        cable.is_mended.set()
        for one in watches:
            one._thread.join(10)
    (line,) = said(capfd)
    lost = "lost the connection to rank 0, which hosts the store"
    cause = "(DistBackendError: Timed out waiting 5000ms for recv)"
    assert line in {f"rank {rank}: {lost} {cause}" for rank in (2, 3)}


def test_a_rank_that_its_watch_ends_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """The main thread is blocked: the alarm is heard, and then the store is lost."""
    cable = Cable()
    cable.is_mended.set()
    with ranks(cable, 3) as (one,):
        one._hears = lambda key: setattr(cable, "is_cut", True)  # type: ignore[method-assign,assignment]
        cable.store.set("alarm", "1")
        one._thread.join(10)
        assert not one._thread.is_alive()
    (line,) = said(capfd)
    assert line.startswith("rank 3: lost the connection to rank 0, which hosts the store (")

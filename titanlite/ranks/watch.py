"""The watchdog: a thread in each rank that detects a hang, and ends the run with a report.

A rank raises an alarm if its collective fails, if it waits for too long, or if it is about to
abort. The alarm is a key in a store that only the watchdogs use. Each rank that sees it writes its
state to the store (hang_state.py). The rank that raised the alarm writes the report (report.py).
Then all ranks end, even if their main threads are blocked.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlite.errors import LostWorldError
from titanlite.ranks import hang_state, stacks
from titanlite.ranks.crash_state import (
    GONE,
    RUNNING,
    STOPPED,
    BlackBox,
    ProcessRecord,
    before_abort,
)
from titanlite.ranks.launch import ALARM, FAULTS, REPORT, Place
from titanlite.ranks.notices import Notices
from titanlite.ranks.report import Absent, RankState, Report, write_report
from titanlite.ranks.signals import handling
from titanlite.ranks.unwatched import Unwatched

# The time between two reads of the store.
POLL_SECONDS = 0.5
# How long the ranks may take to write their state, and then to end by themselves.
ANSWER_SECONDS = 3.0
END_SECONDS = 2.0

FINISHED = "has finished its run"
REPORTED = b"reported"
# The rank that tells why the run ends, and a line about it; here no rank did.
NO_END = json.dumps((-1, "a rank has raised the alarm, and its report has not come"))


@dataclass(frozen=True)
class Traces:
    """Where the traces of a hung run are written: one file per rank, `folder/prefix + rank`."""

    folder: Path
    prefix: str = "rank_"


class Watch(Unwatched):
    """The watchdog of one rank. The main thread calls `explain` if it has an error.

    `store` is shared by all ranks and used by nothing else. `describe_place` gives the mesh
    coordinates of any rank, so that a report has them for ranks that do not respond, too. `on_gpu`
    says that the ranks communicate by NCCL.
    """

    def __init__(
        self,
        place: Place,
        store: Any,
        timeout_seconds: float,
        traces: Traces | None = None,
        describe_place: Callable[[int], str] = lambda rank: "",
        *,
        on_gpu: bool = False,
    ) -> None:
        super().__init__(describe_place)
        self._rank, self._world_size = place.rank, place.world_size
        self._store = store
        self._folder = _exchange_folder(place)
        self._notices = Notices(place, store, is_launched=self._folder is not None)
        self._traces = traces
        self._main = threading.get_ident()
        self._stack = stacks.ThreadStack()
        self._error: BaseException | None = None
        self._aborting = False
        self._store_is_lost = False
        self._is_answered = False
        self._has_given_up = False
        self._closing = False
        self._wake, self._over, self._left = (threading.Event() for _ in range(3))
        self.timeout_seconds = timeout_seconds
        self._timeout_key = "comm.init_timeout_seconds"
        self._still_since = time.monotonic()
        self._still: Any = None
        self._on_gpu, self._gpu_seen = on_gpu, -math.inf
        self._axes: dict[str, str] = {}
        self._box = BlackBox(self._folder, place.rank, self._main)
        self._thread = threading.Thread(target=self._run, name="fault watch", daemon=True)
        store.set(f"place/{place.rank}", json.dumps(asdict(ProcessRecord.of_this(self._box))))
        self._thread.start()

    def name_groups(self, axes: Mapping[str, str]) -> None:
        self._axes = dict(axes)

    def set_timeout(self, seconds: float, key: str = "comm.train_timeout_seconds") -> None:
        self._still_since = time.monotonic()
        self.timeout_seconds, self._timeout_key = seconds, key

    @contextlib.contextmanager
    def allowing(self, seconds: float, key: str) -> Iterator[None]:
        """Inside, another timeout. After an error it stays, since it applied to the failed wait."""
        before = self.timeout_seconds, self._timeout_key
        self.set_timeout(seconds, key)
        yield
        self.set_timeout(*before)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Pass an error raised inside to `explain` at once, before outer contexts are closed."""
        try:
            yield
        except BaseException as error:
            if self.explain(error):
                raise LostWorldError(f"{type(error).__name__}: {error}") from error
            raise

    def explain(self, error: BaseException) -> bool:
        """Report an error of the main thread; returns whether the cause is reported elsewhere.

        An error of communication raises the alarm, and returns when the report has been written.
        Any other error is this rank's own; it is only recorded for the other ranks.
        """
        if isinstance(error, LostWorldError):
            return False
        if not is_communication_error(error):
            finished = f"failed with {type(error).__name__}: {error}".splitlines()[0]
            is_failure = not isinstance(error, SystemExit | GeneratorExit)
            self._leave(finished if is_failure else FINISHED)
            self._notices.settle_who_tells(error)
            return False
        self._error = error
        # torchrun's agent sends SIGTERM when a rank dies, before the report.
        with handling(signal.SIG_IGN, signal.SIGTERM):
            self._wake.set()
            self._over.wait(2 * ANSWER_SECONDS + POLL_SECONDS)
            if self._is_answered:
                self._over.wait(3 * ANSWER_SECONDS + END_SECONDS)
        if self._store_is_lost or not self._over.is_set():
            # Of a cable that is cut, the store does not say so: it does not answer.
            self._notices.tell_lost(error)
        return self._store_is_lost or not self._has_given_up

    def close(self, finished: str = FINISHED) -> None:
        """Stop the watchdog at the regular end of a run."""
        if not self._over.is_set() and self._error is None:
            self._leave(finished)
        self._left.set()
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(ANSWER_SECONDS)
        self._box.close()
        self._notices.close()

    def _leave(self, how: str) -> None:
        with contextlib.suppress(RuntimeError):
            if not self._store.check([f"left/{self._rank}"]):
                self._store.set(f"left/{self._rank}", how)

    def prepare_abort(self) -> None:
        """Delay an abort of this process until its state is written."""
        self._aborting = True
        self._wake.set()
        self._over.wait(2 * ANSWER_SECONDS)

    def _run(self) -> None:
        while True:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            if self._closing and self._error is None:
                return
            is_alarmed = self._error is not None or self._aborting
            try:
                stack = self._stack.read()
                reason = self._reason(stack)
                self._box.note(hang_state.show_stack(stack))
                is_alarmed = is_alarmed or bool(reason) or self._others_are_alarmed()
                if is_alarmed:
                    self._end_together(reason)
                    return
            except Exception as error:
                self._give_up(error, is_alarmed)
                return

    def _others_are_alarmed(self) -> bool:
        try:
            return bool(self._store.check(["alarm"]))
        except RuntimeError:
            # Without torchrun the store is in rank 0, which may have finished.
            self._store_is_lost = True
            raise

    def _give_up(self, error: Exception, is_alarmed: bool) -> None:
        """Stop watching after an error of the watchdog; end the rank only if there is an alarm."""
        self._has_given_up = True
        if is_alarmed and isinstance(error, RuntimeError):
            self._store_is_lost = True
            if self._error is None:
                # The main thread is blocked, and cannot tell.
                self._notices.tell_lost(error)
        self._over.set()
        if is_alarmed:
            if not self._store_is_lost:
                traceback.print_exception(error)
            self._end_unless_left()
        elif not self._store_is_lost:
            self._notices.say(
                f"the watchdog failed with {type(error).__name__} ({error}); "
                "the run continues without it"
            )

    def _reason(self, stack: list[stacks.CodePlace]) -> str:
        """The timeout that expired, as text; "" if none did."""
        text = "" if self._error is None else str(self._error)
        if "imed out" in text or "imeout" in text or self._stands_still(stack):
            return f"ranks waited {self.timeout_seconds:g} s ({self._timeout_key})"
        return ""

    def _stands_still(self, stack: list[stacks.CodePlace]) -> bool:
        """Whether the main thread has been in the same wait for longer than the timeout.

        gloo's collectives time out by themselves. Its P2P messages use the timeout with which their
        group was created, and NCCL's collectives return before the device has completed them.

        A rank on a GPU that has not moved for so long may still be well, in a long kernel or a long
        computation on the CPU. So its flight recorder is read only once in each timeout.
        """
        state = (hang_state.sequence_numbers(), stack)
        now = time.monotonic()
        if state != self._still:
            self._still, self._still_since = state, now
            return False
        seconds = now - self._still_since
        if seconds <= self.timeout_seconds:
            return False
        if hang_state.is_overdue(stack, seconds):
            return True
        if not self._on_gpu or now - self._gpu_seen <= self.timeout_seconds:
            return False
        self._gpu_seen = now
        return hang_state.gpu_is_overdue()

    def _end_together(self, reason: str) -> None:
        is_reporter = self._store.add("alarm", 1) == 1
        self._is_answered = True
        if is_reporter and self._folder is not None:
            (self._folder / ALARM).touch()
        state = hang_state.take_state(self._rank, self._main, axes=self._axes, error=self._error)
        self._store.set(f"state/{self._rank}", json.dumps(asdict(state)))
        if is_reporter:
            self._report(state, reason)
        elif self._hears("verdict"):
            if self._store.get("verdict") == REPORTED:
                self._write_traces()
            end = self._store.get("end") if self._hears("end") else NO_END
            self._notices.tell(*json.loads(end))
        else:
            self._notices.tell(*json.loads(NO_END))
        self._over.set()
        self._end_unless_left()

    def _report(self, state: RankState, reason: str) -> None:
        states, absent = self._collect(state)
        failed = [r for r, other in states.items() if other.finished not in ("", FINISHED)]
        # A rank with an error of its own reports that error itself.
        self._store.set("verdict", "failed" if failed else REPORTED)
        if failed:
            where, headline = failed[0], f"rank {failed[0]} {states[failed[0]].finished}"
        else:
            for process in filter(None, map(self._process, absent)):
                process.kill()
            self._write_traces()
            here = [f"traced/{rank}" for rank, other in states.items() if not other.finished]
            _wait_until(lambda: self._store.check(here), END_SECONDS)
            report = write_report(states, absent, reason, self.describe_place)
            self._deliver(report)
            where, headline = self._rank, f"rank {report.rank} {report.headline}"
        self._store.set("end", json.dumps((where, headline)))
        self._notices.tell(where, headline)

    def _hears(self, key: str) -> bool:
        return _wait_until(lambda: self._store.check([key]), ANSWER_SECONDS + 2)

    def _end_unless_left(self) -> None:
        """End the process, unless its main thread ends by itself within END_SECONDS."""
        if not self._left.wait(END_SECONDS):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _collect(self, own: RankState) -> tuple[dict[int, RankState], dict[int, Absent]]:
        """The states of the ranks that report, and what is known about the others."""
        states, absent = {self._rank: own}, {}
        pending = set(range(self._world_size)) - {self._rank}
        deadline = time.monotonic() + ANSWER_SECONDS
        while pending:
            is_late = time.monotonic() > deadline
            for rank in sorted(pending):
                if self._store.check([f"left/{rank}"]):
                    how = self._store.get(f"left/{rank}").decode()
                    states[rank] = RankState(rank, finished=how)
                elif self._store.check([f"state/{rank}"]):
                    answer = json.loads(self._store.get(f"state/{rank}"))
                    states[rank] = RankState.of_dict(answer)
                elif is_late or self._is_out(rank):
                    absent[rank] = self._absent(rank)
            pending -= {*states, *absent}
            if pending:
                time.sleep(POLL_SECONDS / 10)
        return states, absent

    def _is_out(self, rank: int) -> bool:
        """Whether a rank cannot report, since its process is dead or stopped."""
        process = self._process(rank)
        return process is not None and process.state() in (GONE, STOPPED)

    def _process(self, rank: int) -> ProcessRecord | None:
        """The process of a rank; None if it never joined."""
        if not self._store.check([f"place/{rank}"]):
            return None
        return ProcessRecord(**json.loads(self._store.get(f"place/{rank}")))

    def _absent(self, rank: int) -> Absent:
        process = self._process(rank)
        if process is None:
            return Absent("did not join the rendezvous")
        state = process.state()
        at = f"(process {process.number} on {process.host})"
        text = f"{state} by a signal {at}" if state == STOPPED else f"{state or RUNNING} {at}"
        return Absent(text, process.stack())

    def _deliver(self, report: Report) -> None:
        body = report.body
        if self._traces is not None:
            body += f"\ntraces: {self._traces.folder}"
        if self._folder is None:
            print(f"{body}\nrank {report.rank}: {report.headline}", file=sys.stderr, flush=True)
            return
        values = {
            "rank": report.rank,
            "headline": report.headline,
            "body": body,
            "is_gone": report.headline.startswith(GONE),
        }
        written = self._folder / f"{REPORT}.part"
        written.write_text(json.dumps(values))
        written.rename(self._folder / REPORT)

    def _write_traces(self) -> None:
        if self._traces is not None:
            with contextlib.suppress(OSError):
                self._traces.folder.mkdir(parents=True, exist_ok=True)
                name = self._traces.folder / f"{self._traces.prefix}{self._rank}"
                for backend, dump in hang_state.dump_recorders().items():
                    name.with_name(name.name + backend).write_bytes(dump)
                name.with_name(f"{name.name}.txt").write_text(hang_state.show_stacks())
        self._store.set(f"traced/{self._rank}", "1")


@contextlib.contextmanager
def watching(
    place: Place,
    store: Any,
    timeout_seconds: float,
    traces: Traces | None,
    describe_place: Callable[[int], str],
    *,
    on_gpu: bool = False,
) -> Iterator[Watch]:
    """Inside, a Watch runs in this rank. Raises LostWorldError for errors reported elsewhere."""
    watch = Watch(place, store, timeout_seconds, traces, describe_place, on_gpu=on_gpu)
    with before_abort(watch.prepare_abort):
        try:
            with watch.explaining():
                yield watch
        finally:
            watch.close()


def is_communication_error(error: BaseException) -> bool:
    """Whether an error comes from a process group, so that another rank may be its cause."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search(r"gloo|NCCL|process group|Connection (closed|reset)", str(error))
    )


def _exchange_folder(place: Place) -> Path | None:
    """The folder that local ranks share with their launcher; None under torchrun."""
    if not place.rendezvous.startswith("file://"):
        return None
    folder = Path(place.rendezvous.removeprefix("file://")).parent / FAULTS
    folder.mkdir(exist_ok=True)
    return folder


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for the condition; returns whether it became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 10)
    return is_true

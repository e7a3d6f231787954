"""Start local ranks: one process per rank on this machine; none of them outlives the caller.

Importing this module does not import torch, so the launcher stays small. A fork server imports
torch once and never runs an operation, so forking it is always safe; every rank is forked from it
(fork_server.py).
Functions are sent with cloudpickle, so functions defined in a notebook work too.
"""

import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from titanlite import pickles
from titanlite.errors import ConfigError, LostWorldError, RankError, TitanliteError, number_ranks
from titanlite.ranks.fork_server import PATHS, set_environment, start_fork_server
from titanlite.ranks.machine import check_local_ranks
from titanlite.ranks.signals import StopRequest, flush_output

# How long the other ranks of a failed run may take to send their errors, and then to end.
REPORT_SECONDS = 2.0
END_SECONDS = 5.0
# The extra time once a rank has raised the alarm and the report is being written.
ALARM_SECONDS = 5.0
# What the messages of errors hold if another rank is lost.
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process")
# The folder for faults in the rendezvous folder of local ranks. In it, a file that marks the alarm,
# and the report (titanlite/ranks/watch.py).
FAULTS, ALARM, REPORT = "faults", "alarm", "report.json"


@dataclass(frozen=True)
class Place:
    """The rank of a process, the sizes of its world, and the URL of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str
    orders: Connection | StopRequest | None = field(default=None, compare=False, repr=False)
    """On which a local rank receives the launcher's request to stop."""

    @property
    def is_one_node(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def folder(self) -> Path:
        """The folder that local ranks share with the launcher that started them."""
        return Path(self.rendezvous.removeprefix("file://")).parent


# The rendezvous of ranks that are threads of one process (threads.py).
THREADS = "threads://"
# The place of the only process of a world, which needs no rendezvous.
ALONE = Place(0, 1, 0, 1, rendezvous="")


def spawn(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout_seconds: float | None = None,
    stop: StopRequest | None = None,
    max_ranks: int | None = None,
    threads: bool = False,
) -> list[Any]:
    """Call `function(place, *args)` in `num_ranks` new local processes; return their results.

    The results are in rank order. `open_world(place)` creates the process group. If a rank raises
    or dies, or after `timeout_seconds`, the other ranks are ended and RankError is raised with the
    rank and its traceback; a rank's TitanliteError is raised unchanged. No process outlives the
    call or the caller. If the caller requests a stop through `stop`, each rank receives it in
    `place.orders`. Raises ConfigError if `num_ranks` exceeds `max_ranks`, by default what the
    machine's cores and memory allow. A deadlock ends with a report after `open_world`'s
    `init_timeout_seconds`.

    With `threads`, the ranks are threads of this process, of which one runs at a time, each with
    its own copy of `args`. There is no timeout then: RankError is raised as soon as no rank can go
    on, with what each waits for.
    """
    if threads:
        check_local_ranks(num_ranks, allowed=max_ranks, are_threads=True)
        from titanlite.ranks.threads import run_threads

        places = [Place(n, num_ranks, n, num_ranks, THREADS) for n in range(num_ranks)]
        with _noting_the_report():
            return run_threads(function, places, *args, stop=stop)

    def send_result(place: Place, connection: Connection) -> None:
        place = replace(place, orders=connection)
        _send(connection, ("message", pickles.dumps(function(place, *args))))

    with _noting_the_report(), Ranks(send_result, num_ranks, max_ranks) as ranks:
        if stop is not None:

            def pass_on() -> None:
                for rank in range(num_ranks):
                    ranks.send(rank, b"stop")

            stop.on_request = pass_on
            if stop.is_asked:
                pass_on()
        return ranks.receive_all(timeout_seconds)


@contextlib.contextmanager
def _noting_the_report() -> Iterator[None]:
    """Let Python print the report of a failed rank below the traceback of the caller."""
    try:
        yield
    except RankError as error:
        # Python prints the traceback of a cause by itself; older ones than 3.11 print no notes.
        if error.__cause__ is None and error.rank_traceback and hasattr(error, "add_note"):
            error.add_note(error.rank_traceback.rstrip())
        raise


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Local processes that each run `serve(place, connection)` and exchange bytes with the caller.

    `serve` receives the bytes of `send` with `connection.recv_bytes()`, answers with
    `connection.send(("message", answer_bytes))`, and returns when the connection is closed
    (EOFError). This is a context manager; on exit, even by an error, the processes are ended.
    Raises ConfigError if `num_ranks` exceeds `max_ranks` or, if that is None, the machine's limit.
    """

    def __init__(
        self,
        serve: Callable[[Place, Connection], None],
        num_ranks: int,
        max_ranks: int | None = None,
    ) -> None:
        check_local_ranks(num_ranks, allowed=max_ranks)
        context = multiprocessing.get_context("forkserver")
        own = {name: os.environ.get(name) for name in PATHS}
        start_fork_server()
        # Only `close` removes it: ranks need it until they have ended, also at interpreter exit.
        self._folder = Path(tempfile.mkdtemp(prefix="titanlite-"))
        self._ranks: list[_RankProcess] = []
        # Only this process keeps the other end open. It closes when this process ends or dies.
        lifeline, alive = context.Pipe(duplex=False)
        # Must run before multiprocessing joins its children at exit, which would wait for these.
        self.close = Finalize(self, _end, (self._ranks, self._folder, alive), exitpriority=1)
        call = pickles.dumps(serve)
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            place = Place(rank, num_ranks, rank, num_ranks, f"file://{self._folder}/meet")
            process = context.Process(
                target=_run_rank,
                args=(place, call, theirs, lifeline, sys.path, own),
                name=f"rank {rank}",
            )
            with _hidden_main():
                process.start()
            theirs.close()
            self._ranks.append(_RankProcess(process, ours))
        lifeline.close()

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            self.terminate()
        self.close()

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def folder(self) -> Path:
        """The folder that the ranks share, in which they meet; it is removed with them."""
        return self._folder

    def terminate(self) -> None:
        """Kill the processes now; `close` waits until they have ended."""
        for rank in self._ranks:
            # Not SIGTERM: a run that saves checkpoints treats that as a request to stop.
            rank.process.kill()

    def send(self, rank: int, message: bytes) -> None:
        """Send a message to a rank. A dead rank is reported by `receive`, not here."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._ranks[rank].connection.send_bytes(message)

    def receive(self, pending: Collection[int], deadline: float | None) -> dict[int, bytes]:
        """The next message of each pending rank that has sent one; empty at the deadline.

        `deadline` is a value of time.monotonic(). Raises RankError if a rank has failed.
        """
        outcomes = self._take(pending, deadline)
        if any(kind != "message" for kind, _ in outcomes.values()):
            # A failing rank makes its peers fail, and a peer's error may arrive first.
            self._hear_out(set(pending) - set(outcomes), outcomes)
            _raise_first_cause(outcomes, self._report(), self._last_stack)
        return {rank: what for rank, (_, what) in outcomes.items()}

    def receive_all(self, timeout_seconds: float | None) -> list[Any]:
        """The value in the next message of every rank, in rank order.

        Raises RankError if a rank has failed, or has not answered in time.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        messages: dict[int, bytes] = {}
        while pending := set(range(len(self))) - set(messages):
            received = self.receive(pending, deadline)
            if not received:
                raise not_done(pending, timeout_seconds)
            messages.update(received)
        return [pickles.loads(messages[rank]) for rank in range(len(self))]

    def _hear_out(self, waiting: set[int], outcomes: dict[int, tuple[str, Any]]) -> None:
        """Wait for the errors of the other ranks, until there is a report or the time is up."""
        start = time.monotonic()
        while waiting and self._report() is None:
            is_alarmed = (self._folder / FAULTS / ALARM).exists()
            seconds = REPORT_SECONDS + ALARM_SECONDS * is_alarmed
            if time.monotonic() - start > seconds:
                return
            late = self._take(waiting, time.monotonic() + 0.1)
            outcomes.update(late)
            waiting -= set(late)

    def _report(self) -> dict[str, Any] | None:
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self._folder / FAULTS / REPORT).read_text())
        return None

    def _last_stack(self, rank: int) -> str:
        """The stack at which a rank has crashed, or the one recorded last; "" without any."""
        from titanlite.ranks.crash_state import read_black_box  # imports torch

        stack = read_black_box(str(self._folder / FAULTS / f"stack-{rank}"))
        heading = f"Python stack of rank {rank}, as last recorded (most recent call last):"
        return "\n  ".join([heading, *stack]) if stack else ""

    def _take(self, pending: Collection[int], deadline: float | None) -> dict[int, tuple[str, Any]]:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        by_connection = {self._ranks[rank].connection: rank for rank in pending}
        outcomes: dict[int, tuple[str, Any]] = {}
        for connection in wait(list(by_connection), timeout):
            rank = by_connection[connection]  # type: ignore[index]
            try:
                outcomes[rank] = self._ranks[rank].connection.recv()
            except (EOFError, ConnectionResetError):
                self._ranks[rank].process.join(END_SECONDS)
                outcomes[rank] = ("death", self._ranks[rank].process.exitcode)
        return outcomes


def not_done(pending: Collection[int], timeout_seconds: float | None) -> RankError:
    """The error for ranks that did not answer in time."""
    return RankError(
        min(pending),
        f"{number_ranks(pending)} did not finish within {timeout_seconds:g} s; "
        "all ranks were terminated",
    )


@dataclass
class _RankProcess:
    process: multiprocessing.process.BaseProcess
    connection: Connection


def _raise_first_cause(
    outcomes: dict[int, tuple[str, Any]],
    report: dict[str, Any] | None,
    last_stack: Callable[[int], str],
) -> None:
    failed = [(rank, *outcome) for rank, outcome in sorted(outcomes.items())]
    deaths = [(index, what) for index, kind, what in failed if kind == "death"]
    errors = [(index, what) for index, kind, what in failed if kind == "error"]
    mistakes = [(index, what["mistake"]) for index, what in errors if what["mistake"] is not None]
    for index, mistake in mistakes:
        mistake.rank = index
        raise mistake
    if report is not None:
        rank, headline = report["rank"], report["headline"]
        exit_code = dict(deaths).get(rank)
        if report["is_gone"] and exit_code is not None and exit_code < 0:
            headline = _how_ended(exit_code)
        raise RankError(rank, headline, report["body"])
    # Peers of the failed rank report a lost connection, so other errors come first.
    errors.sort(key=lambda error: error[1]["lost_peer"])
    if errors and not (deaths and errors[0][1]["lost_peer"]):
        index, what = errors[0]
        raise RankError(index, what["message"], what["traceback"])
    index, exit_code = deaths[0]
    if exit_code is not None and exit_code < 0:
        raise RankError(index, _how_ended(exit_code), last_stack(index))
    raise RankError(index, f"exited with status {exit_code} without a result")


def _how_ended(exit_code: int) -> str:
    return f"was killed by {signal.Signals(-exit_code).name}"


def _end(ranks: list[_RankProcess], folder: Path, alive: Connection) -> None:
    """End all ranks: each exits when its connection closes, or is killed after END_SECONDS."""
    for rank in ranks:
        rank.connection.close()
    deadline = time.monotonic() + END_SECONDS
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
        if rank.process.is_alive():
            rank.process.kill()
            rank.process.join()
        rank.process.close()
    alive.close()
    shutil.rmtree(folder, ignore_errors=True)


def _run_rank(
    place: Place,
    call: bytes,
    connection: Connection,
    lifeline: Connection,
    path: list[str],
    own: dict[str, str | None],
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.path[:] = path
    set_environment(own)
    _end_with(lifeline, place.folder)
    try:
        pickles.loads(call)(place, connection)
    except BaseException as error:
        _send(connection, ("error", _describe(error)))
    # multiprocessing flushes stdout as the process ends, and prints a traceback where that fails.
    flush_output()
    connection.close()


def _send(connection: Connection, message: tuple[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        connection.send(message)


def _describe(error: BaseException) -> dict[str, Any]:
    message = f"{type(error).__name__}: {error}"
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is not error:
        # The error of a pipeline schedule names the stage and its inputs, but not the cause.
        message += f" (from {type(cause).__name__}: {cause})"
    is_lost = isinstance(error, LostWorldError)
    return {
        "mistake": error if isinstance(error, TitanliteError) and not is_lost else None,
        "message": message,
        "traceback": "".join(traceback.format_exception(error)),
        "lost_peer": is_lost or any(phrase in message for phrase in LOST),
    }


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the caller's script again in every rank.

    Functions are sent by value, so the script is not needed, and a script without an
    `if __name__ == "__main__"` would start ranks again.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with(lifeline: Connection, folder: Path) -> None:
    """Kill this process when the launcher, which holds the other end of `lifeline`, is gone.

    The parent process cannot be watched instead: it is the fork server, which lives as long as any
    rank. A killed launcher leaves `folder` behind, so it is removed here.
    """

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            lifeline.recv_bytes()
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def torchrun_place() -> Place | None:
    """The place of this process from torchrun's environment variables; None without torchrun."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = [name in os.environ for name in names]
    if not any(given[:2]):
        return None
    if not all(given) or not all(os.environ[name].isdecimal() for name in names):
        shown = ", ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        raise ConfigError(f"environment: {shown} does not define a rank; start with torchrun")
    rank, world_size, local_rank, local_world_size = (int(os.environ[name]) for name in names)
    return Place(rank, world_size, local_rank, local_world_size, rendezvous="env://")


def choose_device(requested: str, num_local_ranks: int) -> str:
    """'cuda' if there is a GPU for each local rank, else 'cpu'; `requested` may fix the choice.

    Raises ConfigError if CUDA is requested and there are fewer GPUs than local ranks.
    """
    if requested == "cpu":
        return "cpu"
    available = count_gpus()
    if available >= num_local_ranks:
        return "cuda"
    if requested == "cuda":
        whom = "a GPU" + f" for each of {num_local_ranks} ranks here" * (num_local_ranks > 1)
        ways = ', fewer ranks, or comm.mode = "threads", whose ranks share one' if available else ""
        raise ConfigError(
            f'job.device: "cuda" needs {whom}, and there are {available}; use "auto" or "cpu"{ways}'
        )
    return "cpu"


def collect_on_gpu() -> None:
    """Free what a run of this process has left on a GPU in reference cycles, such as its model."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()


def count_gpus() -> int:
    """The number of CUDA devices of this machine; imports torch only if there is a driver."""
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")):
        return 0
    import torch

    return torch.cuda.device_count()

"""SIGINT and SIGTERM: a request to finish the step, save and exit, or to exit now; torch-free."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from titanlite.errors import OutputClosedError
from titanlite.observe.terminal import tell

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# One Ctrl-C or scancel may reach a process twice: from the terminal, and from its parent.
ONE_REQUEST_SECONDS = 1.0
STOPPING = "stopping once it has saved; a second Ctrl-C ends it now"


class StopRequest:
    """Records the first SIGINT or SIGTERM: `with StopRequest() as stop: ... stop.is_asked`.

    A second signal, at least a second later, raises KeyboardInterrupt(number). `orders` is the pipe
    on which a rank's launcher forwards a request, or the launcher's own StopRequest. `on_request`
    is called at the first signal, which `rank` 0 or the launcher answers. Signals that are already
    ignored stay ignored. With `enabled` False, nothing is changed.
    """

    def __init__(
        self, orders: "Connection | StopRequest | None" = None, rank: int = 0, enabled: bool = True
    ) -> None:
        self.on_request: Callable[[], None] = lambda: None
        self._answers = rank == 0 and orders is None
        self._orders = orders if enabled else None
        self._enabled = enabled and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._asked_at: float | None = None

    @property
    def is_asked(self) -> bool:
        """Whether a signal or the launcher has asked this process to stop."""
        return self._asked_at is not None or (self._orders is not None and self._orders.poll())

    def poll(self) -> bool:
        """The same, as of the pipe that ranks in other processes have."""
        return self.is_asked

    def __enter__(self) -> "StopRequest":
        if self._enabled:
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            if self._answers:
                # The signal may have interrupted a write to stderr, which takes no second one.
                with contextlib.suppress(RuntimeError, OSError):
                    tell(STOPPING, "\r")
            self.on_request()
        elif now - self._asked_at >= ONE_REQUEST_SECONDS:
            raise KeyboardInterrupt(number)


@contextlib.contextmanager
def handling(handler: Any, *numbers: int) -> Iterator[None]:
    """Inside, `handler` gets these signals; signal.SIG_IGN ignores them.

    Only the main thread can set signal handlers; in another thread nothing is changed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = [(number, signal.signal(number, handler)) for number in numbers if is_main]
    try:
        yield
    finally:
        for number, own in before:
            signal.signal(number, own)


def unwinding_at_sigterm() -> AbstractContextManager[None]:
    """Inside, SIGTERM raises KeyboardInterrupt(SIGTERM), so that context managers are closed."""

    def unwind(number: int, _frame: object) -> None:
        raise KeyboardInterrupt(number)

    return handling(unwind, signal.SIGTERM)


@contextlib.contextmanager
def ending_with_the_output() -> Iterator[None]:
    """Where what reads the output has closed it, as `head` does, the process ends without a word.

    Its exit status is then that of a process that SIGPIPE has ended. The signal itself stays
    ignored: a closed socket of a process group is an error to report.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, OutputClosedError):
        _discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None


def flush_output() -> None:
    """Write what is left of stdout; if its reader has closed it, discard it without an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Let what is left in the buffer go nowhere: Python writes it as the process ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupt_status(interrupt: KeyboardInterrupt) -> int:
    """Print the signal that stopped this process, in one line; returns the exit status."""
    number = interrupt.args[0] if interrupt.args else signal.SIGINT
    print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
    return 128 + int(number)

"""The state of a rank that cannot report it itself: its stack, and whether its process is alive.

BlackBox and ProcessRecord let other processes on the same machine read them. before_abort runs a
function in a process that is about to abort. Nothing here may harm a healthy rank, however slow
the machine is.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.ranks.hang_state import show_place
from titanlite.ranks.stacks import parse_stacks

# Time limit of the function that runs before an abort; then the process is ended anyway.
LONGEST_SECONDS = 10
# Time limit for a process to write its stack when it is asked to.
LONGEST_STACK_SECONDS = 1.0
# The signal that asks for a stack, used by nothing else; 0 if the system has no real-time signals.
ASK = int(signal.SIGRTMAX) - 1 if hasattr(signal, "SIGRTMAX") else 0

# States of a process that did not report.
GONE, STOPPED, RUNNING = "has died", "is stopped", "does not respond"


class BlackBox:
    """A file with this rank's stack, for other processes to read when the rank cannot report it.

    It is in the folder that the ranks share, or an anonymous file that disappears with the process.
    It holds the last recorded stack. A process that receives ASK appends the stack of its main
    thread (`ask_for_stack`), and one that crashes appends the stacks of all its threads.

    Reading the frames of a running thread without holding the GIL can crash the process.
    faulthandler's timer does that, and so does its signal handler if it interrupts the interpreter.
    So neither is used in a healthy run: the watchdog records the stack while it holds the GIL
    (stacks.py), and the signal goes only to ranks that did not report after an alarm.
    """

    def __init__(self, folder: Path | None, rank: int, thread: int) -> None:
        self._thread = f"0x{thread:016x}"
        self._lock = threading.Lock()
        if folder is not None:
            self.path = str(folder / f"stack-{rank}")
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        elif hasattr(os, "memfd_create"):
            self._file = os.memfd_create(f"titanlite-{rank}")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = -1, ""
        self._reports_crashes = self._file >= 0 and not faulthandler.is_enabled()
        if self._reports_crashes:
            faulthandler.enable(self._file)
        self.answers = self._file >= 0 and ASK > 0 and signal.getsignal(ASK) == signal.SIG_DFL
        if self.answers:
            faulthandler.register(ASK, self._file, all_threads=False)
        self.note([])

    def note(self, stack: list[str]) -> None:
        """Replace the recorded stack by `stack`. A full disk must not fail the run."""
        text = "\n".join([self._thread, *stack, "", ""]).encode()
        with self._lock, contextlib.suppress(OSError):
            if self._file >= 0:
                os.ftruncate(self._file, 0)
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, text)

    def close(self) -> None:
        # Under the lock: `note` must not write to another file that reuses this descriptor.
        with self._lock:
            if self._file < 0:
                return
            if self.answers:
                faulthandler.unregister(ASK)
            if self._reports_crashes:
                faulthandler.disable()
            os.close(self._file)
            self._file = -1


def ask_for_stack(process: ProcessRecord) -> list[str]:
    """The stack of another process on this machine, innermost last; empty if it sends none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.number, ASK)
        deadline = time.monotonic() + LONGEST_STACK_SECONDS
        before: list[str] = []
        while time.monotonic() < deadline:
            time.sleep(LONGEST_STACK_SECONDS / 20)
            _, added = _read(process.box)
            # The stack is written line by line: it is complete once it no longer grows.
            if added and added == before:
                return added
            before = added
    return []


def read_black_box(path: str) -> list[str]:
    """The last stack in a black box, innermost last; empty if there is none."""
    noted, added = _read(path)
    return added or noted


def _read(path: str) -> tuple[list[str], list[str]]:
    """The last recorded stack, and the one that faulthandler appended, if any."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return [], []
    thread, _, rest = text.partition("\n")
    noted, _, rest = rest.partition("\n\n")
    stacks = parse_stacks(rest)
    # A thread that was asked for its own stack writes it without its number.
    added = stacks.get(int(thread, 16)) or stacks.get(0, []) if thread else []
    return noted.strip().splitlines(), [show_place(*place) for place in added]


@contextlib.contextmanager
def before_abort(call: Callable[[], None]) -> Iterator[None]:
    """Inside, `call` runs before the process aborts.

    gloo and NCCL abort the process from a thread of their own when a message has the wrong size or
    a collective times out. A Python signal handler would run in the main thread, which is blocked.
    """
    process = os.getpid()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)

    @kind
    def handler(_number: int) -> None:
        if os.getpid() != process:
            return
        # The process must end even if `call` hangs.
        libc.alarm(LONGEST_SECONDS)
        call()

    libc: Any = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    before = libc.signal(int(signal.SIGABRT), ctypes.cast(handler, ctypes.c_void_p))
    try:
        yield
    finally:
        libc.signal(int(signal.SIGABRT), before)


@dataclass(frozen=True)
class ProcessRecord:
    """How other ranks find a rank's process; sent as JSON."""

    host: str
    number: int
    start: str
    box: str
    """The path of its black box."""
    answers: bool
    """Whether it appends its stack to the box when it receives ASK."""

    @classmethod
    def of_this(cls, box: BlackBox) -> ProcessRecord:
        _, start = process_status("self")
        return cls(socket.gethostname(), os.getpid(), start, box.path, box.answers)

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def state(self) -> str:
        """GONE, STOPPED or RUNNING; "" if unknown: on another machine, or without /proc."""
        if not self.is_here or not Path("/proc/self/stat").exists():
            return ""
        letter, start = process_status(str(self.number))
        if letter in "ZX" or start != self.start:
            return GONE
        return STOPPED if letter in "Tt" else RUNNING

    def kill(self) -> None:
        """Kill the process if it is on this machine and still alive."""
        if self.state() not in ("", GONE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)

    def stack(self) -> list[str]:
        """The stack of its main thread, innermost last: as it is now, or as last recorded.

        Only for a process whose run has already failed: see BlackBox.
        """
        if not self.is_here:
            return []
        asked = ask_for_stack(self) if self.answers and self.state() == RUNNING else []
        return asked or read_black_box(self.box)


def process_status(process: str) -> tuple[str, str]:
    """State letter and start time of a process on this machine; ("X", "") if there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]

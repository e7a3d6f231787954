"""What can be known of a rank that cannot speak: its stack, whether it lives, and a last call.

The others read these from outside, on the same machine; before_abort is a last chance from inside.
Nothing here may harm a rank that is well, however long the machine keeps its threads waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.ranks.account import shorten

# What is done before an abort may take so long; then the process is ended all the same.
LONGEST_SECONDS = 10
# And a process that is asked for its stack, to write it.
LONGEST_STACK_SECONDS = 1.0
# The signal that asks: one that nothing else uses, where the system has such; 0 where it has not.
ASK = int(signal.SIGRTMAX) - 1 if hasattr(signal, "SIGRTMAX") else 0

# States of a process.
GONE, STOPPED, RUNNING = "has died", "is stopped", "does not answer"


class BlackBox:
    """Where other processes read this rank's stack when it can no longer report it itself.

    A file in the world's own folder, or one without a name that is gone with the process. It holds
    the stack that was noted last. A process that receives ASK adds the stack of its main thread
    (`ask_for_stack`), and one that crashes adds the stacks of all its threads.

    Reading the frames of a thread that runs Python without the interpreter's lock can crash the
    process, which is what faulthandler's timer does, and its signal handler too if it interrupts
    the interpreter. So nothing here runs by itself in a healthy world: stacks are noted by a thread
    that holds the lock, and only a rank that has given no account of a lost world is asked.
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
        """Keep `stack` in place of the one before. A full disk is not this run's trouble."""
        stack_lines = "\n".join(stack)
        text = f"{self._thread}\n{stack_lines}\n\n".encode()
        with self._lock, contextlib.suppress(OSError):
            if self._file >= 0:
                os.ftruncate(self._file, 0)
                os.lseek(self._file, 0, os.SEEK_SET)
                os.write(self._file, text)

    def close(self) -> None:
        # Under the lock: `note` may not write to a file that has got this one's number.
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
    """The stack of another process of this machine, innermost last; empty where none comes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.number, ASK)
        deadline = time.monotonic() + LONGEST_STACK_SECONDS
        before: list[str] = []
        while time.monotonic() < deadline:
            time.sleep(LONGEST_STACK_SECONDS / 20)
            _, added = _read(process.box)
            # It is written line by line.
            if added and added == before:
                return added
            before = added
    return []


def read_black_box(path: str) -> list[str]:
    """The last stack in a black box, innermost last; empty where there is none."""
    noted, added = _read(path)
    return added or noted


def _read(path: str) -> tuple[list[str], list[str]]:
    """The stack that was noted last, and the one that the interpreter has added, if it has."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return [], []
    thread, _, rest = text.partition("\n")
    noted, _, rest = rest.partition("\n\n")
    added: list[str] = []
    # Innermost first, a thread a paragraph; where the main thread is the only one it has no number.
    for paragraph in re.split(r"\n\s*\n", rest):
        if not added and (thread in paragraph or paragraph.startswith("Stack ")):
            frames = re.findall(r'File "(.*)", line (\d+) in (.*)', paragraph)
            added = [f"{shorten(file)}:{line} in {name}" for file, line, name in frames[::-1]]
    return noted.strip().splitlines(), added


@contextlib.contextmanager
def before_abort(call: Callable[[], None]) -> Iterator[None]:
    """Inside, `call` is made before the process aborts.

    gloo and NCCL end a process in a thread of theirs when what they receive does not fit, or when
    a collective has timed out. A handler of Python's would run in the main thread, which waits.
    """
    process = os.getpid()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)

    @kind
    def handler(_number: int) -> None:
        if os.getpid() != process:
            return
        # Whatever is broken, the process has to end.
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
    """Where a rank's process is, so that other ranks can look at it from outside."""

    host: str
    number: int
    start: str
    box: str
    """The path of its black box."""
    answers: bool
    """Whether it adds its stack to the box when it receives ASK."""

    @classmethod
    def of_this(cls, box: BlackBox) -> ProcessRecord:
        _, start = process_status("self")
        return cls(socket.gethostname(), os.getpid(), start, box.path, box.answers)

    @classmethod
    def from_json(cls, text: str | bytes) -> ProcessRecord:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def state(self) -> str:
        """GONE, STOPPED or RUNNING; "" for a process that this machine cannot see."""
        if not self.is_here or not Path("/proc/self/stat").exists():
            return ""
        letter, start = process_status(str(self.number))
        if letter in "ZX" or start != self.start:
            return GONE
        return STOPPED if letter in "Tt" else RUNNING

    def kill(self) -> None:
        """End the process, where it is on this machine and still there."""
        if self.state() not in ("", GONE):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.number, signal.SIGKILL)

    def stack(self) -> list[str]:
        """The stack of its main thread, innermost last: as it is now, or as it was noted last.

        Only for a process whose world is lost: see BlackBox.
        """
        if not self.is_here:
            return []
        asked = ask_for_stack(self) if self.answers and self.state() == RUNNING else []
        return asked or read_black_box(self.box)


def process_status(process: str) -> tuple[str, str]:
    """State letter and start time of a process of this machine; ("X", "") where there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]

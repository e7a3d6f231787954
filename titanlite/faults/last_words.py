"""What can be known of a rank that cannot speak: its stack, whether it lives, and a last call.

The others read these from outside, on the same machine; before_abort is a last chance from inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from titanlite.faults.account import shorten

# What is done before an abort may take so long; then the process is ended all the same.
LONGEST_SECONDS = 10


class BlackBox:
    """Where this rank's stack can be read when it can no longer say it itself.

    A file in the world's own folder, or one without a name, which is gone with the process. Where
    `note` is not called for `patience_seconds`, the interpreter writes the stack by itself, and so
    it does when the process crashes.
    """

    def __init__(
        self, folder: Path | None, rank: int, thread: int, patience_seconds: float
    ) -> None:
        self._patience_seconds = patience_seconds
        self._thread = f"0x{thread:016x}"
        if folder is not None:
            self.path = str(folder / f"stack-{rank}")
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        elif hasattr(os, "memfd_create"):
            self._file = os.memfd_create(f"titanlite-{rank}")
            self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        else:
            self._file, self.path = -1, ""
        self._owns_crashes = self._file >= 0 and not faulthandler.is_enabled()
        if self._owns_crashes:
            faulthandler.enable(self._file)
        self.note([])

    def note(self, stack: list[str]) -> None:
        """Write the stack, and have the interpreter write it where this is not called again."""
        if self._file < 0:
            return
        stack_lines = "\n".join(stack)
        text = f"{self._thread}\n{stack_lines}\n\n".encode()
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(self._file, text)
        faulthandler.dump_traceback_later(self._patience_seconds, file=self._file)

    def close(self) -> None:
        if self._file < 0:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._owns_crashes:
            faulthandler.disable()
        os.close(self._file)
        self._file = -1


def read_black_box(path: str) -> list[str]:
    """The last stack in a black box, innermost last; empty where there is none."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return []
    thread, _, rest = text.partition("\n")
    seen, _, dumped = rest.partition("\n\n")
    # What the interpreter wrote by itself, innermost first, a thread a paragraph.
    for paragraph in re.split(r"\n\s*\n", dumped):
        if thread in paragraph:
            frames = re.findall(r'File "(.*)", line (\d+) in (.*)', paragraph)
            return [f"{shorten(file)}:{line} in {name}" for file, line, name in frames[::-1]]
    return seen.strip().splitlines()


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


def describe_process(box: str) -> str:
    _, start = process_status("self")
    return "\n".join([socket.gethostname(), str(os.getpid()), start, box])


def process_status(process: str) -> tuple[str, str]:
    """State letter and start time of a process of this machine; ("X", "") where there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]

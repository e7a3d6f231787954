"""The Python stack of a thread as text, read by another thread without harm to the one that runs.

A frame object of another thread may be used only as long as that thread does not run: TorchDynamo
frees the memory behind the frames it has replaced, and reading such a frame object then crashes the
process (seen with torch 2.13 and Python 3.11: one look in some thousands during a compilation). So
no frame object is made here. The interpreter writes the stack in one call that keeps the GIL.

In Python 3.11 the stacks of all threads may not be read either. A new thread's state is in the
interpreter's list before it is initialized, and the list is not locked while it is read. The
threads of gloo, which take the GIL to free a tensor, make a new state each time. Read 5,000 times a
second, it crashed three of four processes within a minute; 3.10, 3.12 and 3.13 did not crash.
"""

import contextlib
import ctypes
import faulthandler
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

HEADING = r"^(?:Current thread|Thread|Stack)\b(?: 0x([0-9a-f]+))?"
FRAME = r'^  File "(.*)", line (\d+) in (.*)$'


class CodePlace(NamedTuple):
    """A place in the code."""

    file: str
    line: int
    function: str


class ThreadStack:
    """The stack of the thread that makes this object, for other threads of the process to read."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._dump: Callable[[int], object] = faulthandler.dump_traceback  # of all threads
        if sys.version_info[:2] == (3, 11):
            self._dump = _dump_of_this_thread()

    def read(self) -> list[CodePlace]:
        """Its innermost 100 frames, innermost last; empty if no temporary file can be made."""
        try:
            with _scratch_file() as file:
                self._dump(file)
                os.lseek(file, 0, os.SEEK_SET)
                with os.fdopen(os.dup(file), errors="replace") as text:
                    stacks = parse_stacks(text.read())
        except OSError:
            return []
        return stacks.get(self._thread) or stacks.get(0, [])


def _dump_of_this_thread() -> Callable[[int], None]:
    """What faulthandler itself calls, for the one thread that calls this."""
    # Functions of pythonapi keep the GIL.
    get_state: Any = ctypes.pythonapi.PyThreadState_Get
    get_state.restype = ctypes.c_void_p
    state = ctypes.c_void_p(get_state())
    dump: Any = getattr(ctypes.pythonapi, "_Py_DumpTraceback", None)
    if dump is None:
        # An interpreter that hides its own functions: a run without recorded stacks is well.
        return lambda file: None
    dump.argtypes, dump.restype = [ctypes.c_int, ctypes.c_void_p], None
    return lambda file: dump(file, state)


def parse_stacks(text: str) -> dict[int, list[CodePlace]]:
    """The stacks, innermost last, in what faulthandler wrote; a thread without a number is 0."""
    stacks: dict[int, list[CodePlace]] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        heading = re.search(HEADING, paragraph, re.MULTILINE)
        if heading is None:
            continue
        frames = re.findall(FRAME, paragraph, re.MULTILINE)
        stacks[int(heading[1] or "0", 16)] = [
            CodePlace(file, int(line), function) for file, line, function in reversed(frames)
        ]
    return stacks


@contextlib.contextmanager
def _scratch_file() -> Iterator[int]:
    """The descriptor of an empty file without a name, in memory where the system can."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("titanlite-stacks")
        try:
            yield file
        finally:
            os.close(file)
    else:
        with tempfile.TemporaryFile() as named:
            yield named.fileno()

"""The Python stacks of this process's threads as text, read without harming a thread that runs.

A frame object of another thread may be used only as long as that thread does not run: TorchDynamo
frees the memory behind the frames it has replaced, and reading such a frame object then crashes the
process (seen with torch 2.13 and Python 3.11: one look in some thousands during a compilation). So
no frame object is made here. faulthandler writes all stacks in one call that keeps the GIL.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

HEADING = r"^(?:Current thread|Thread|Stack)\b(?: 0x([0-9a-f]+))?"
FRAME = r'^  File "(.*)", line (\d+) in (.*)$'


class Place(NamedTuple):
    """A place in the code."""

    file: str
    line: int
    function: str


def thread_stacks() -> dict[int, list[Place]]:
    """Thread identifier -> its stack, innermost last; empty if no temporary file can be made.

    At most the innermost 100 frames of 100 threads, which is faulthandler's limit.
    """
    try:
        with _scratch_file() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            os.lseek(file, 0, os.SEEK_SET)
            with os.fdopen(os.dup(file), errors="replace") as text:
                return parse_stacks(text.read())
    except OSError:
        return {}


def parse_stacks(text: str) -> dict[int, list[Place]]:
    """The stacks, innermost last, in what faulthandler wrote; a thread without a number is 0."""
    stacks: dict[int, list[Place]] = {}
    for paragraph in re.split(r"\n\s*\n", text):
        heading = re.search(
            r"^(?:Current thread|Thread|Stack)\b(?: 0x([0-9a-f]+))?", paragraph, re.M
        )
        if heading is None:
            continue
        frames = re.findall(FRAME, paragraph, re.MULTILINE)
        stacks[int(heading[1] or "0", 16)] = [
            Place(file, int(line), function) for file, line, function in reversed(frames)
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

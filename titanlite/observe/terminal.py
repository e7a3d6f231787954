"""Whether a stream is a terminal, its colours and its width: for live or plain output."""

import contextlib
import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import TextIO

DEFAULT_WIDTH = 100
SILENT_SECONDS = 1.0


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that interprets control characters."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def terminal_width(stream: TextIO, otherwise: int = DEFAULT_WIDTH) -> int:
    """The number of columns of the terminal `stream`; `otherwise` if that is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or otherwise
    except (OSError, ValueError):
        return otherwise


def folded(text: str, stream: TextIO, indent: str = "") -> str:
    """The text; for a terminal in lines that fit it, with `indent` before those that follow."""
    wrapper = textwrap.TextWrapper(terminal_width(stream, 0) or sys.maxsize, "", indent)
    wrapper.break_on_hyphens = False
    return "\n".join(map(wrapper.fill, text.split("\n")))


def tell(what: str, end: str = "\n") -> None:
    """Say on stderr what runs now: on a terminal in place of what `telling` shows."""
    if is_terminal(sys.stderr):
        shown = f"{what} ..."[: terminal_width(sys.stderr) - 1] if what else ""
        print(f"\r\x1b[2K{shown}", end=end, file=sys.stderr, flush=True)
    elif what and sys.stderr is sys.__stderr__:  # not where a notebook shows it
        print(f"{what} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """As `tell` after a second; on a terminal with the time it has run, each second to its end."""
    ended, start = threading.Event(), time.monotonic()

    def tick() -> None:
        while not ended.wait(SILENT_SECONDS):
            if is_terminal(sys.stderr):
                tell(f"{time.monotonic() - start:3.0f} s  {what}", "\r")
            else:
                tell(what)
                ended.wait()

    clock = threading.Thread(target=tick, daemon=True)
    clock.start()
    try:
        yield
    finally:
        ended.set()
        if time.monotonic() - start > SILENT_SECONDS:
            clock.join()
            tell("", "\r")

"""Whether a stream is a terminal, its colours and its width: for live or plain output."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TextIO

DEFAULT_WIDTH = 100
SILENT_SECONDS = 1.0


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that interprets control characters."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def uses_color(stream: TextIO) -> bool:
    """Whether colours may be written to `stream`: a terminal, and no NO_COLOR."""
    return is_terminal(stream) and "NO_COLOR" not in os.environ


def terminal_width(stream: TextIO) -> int:
    """The number of columns of the terminal `stream`; 100 if unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):
        return DEFAULT_WIDTH


def tell(what: str) -> None:
    """Say on stderr, if that is a terminal, what runs now."""
    if is_terminal(sys.stderr):
        print(f"{what} ...", file=sys.stderr, flush=True)


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """As `tell`, once what runs inside has taken a second."""
    timer = threading.Timer(SILENT_SECONDS, tell, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

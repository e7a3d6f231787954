"""Whether a stream is a terminal, and how wide: what decides between ruled and plain output."""

from __future__ import annotations

import os
from typing import TextIO

DEFAULT_WIDTH = 100


def is_terminal(stream: TextIO) -> bool:
    """Whether control characters sent to `stream` reach a screen that obeys them."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal behind `stream`; 100 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except (OSError, ValueError):
        return DEFAULT_WIDTH

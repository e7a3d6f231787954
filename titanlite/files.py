"""Files that somebody else may have made: regular ones alone are opened, and no more is read than
there is; torch-free.

Opening a named pipe or a device may wait for ever, and a link may lead anywhere. Whatever reads a
file of a checkpoint, a schedule or a log opens it here. What one run alone may write to, it holds.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.1


def open_regular(path: str | Path, *, follow_links: bool = True) -> BinaryIO:
    """A regular file, open to read; raises OSError where it is none, and never waits.

    Without `follow_links` a symbolic link is refused too; links among its parents are followed.
    """
    path = os.fspath(path)
    _require_regular(os.stat(path, follow_symlinks=follow_links), path)
    # What stands there may have changed since. O_NONBLOCK does nothing to a regular file.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, *, most_bytes: int, follow_links: bool = True) -> bytes:
    """All of a regular file; raises OSError where it is none, or larger than `most_bytes`."""
    with open_regular(path, follow_links=follow_links) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes:,} bytes", os.fspath(path))
    return content


def hold(descriptor: int, patience_seconds: float) -> bool:
    """Whether this process alone holds an open file or folder, until it closes it or ends.

    Where another one does, waits that long for it: the ranks of a run that was killed may take some
    time to end. A file system without locks keeps nobody out: there it is always True.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        except OSError:
            return True
        else:
            return True


def shown(text: str, most_characters: int = 80) -> str:
    """A text out of such a file as an error may print it: short, and on one line."""
    text = text if len(text) <= most_characters else f"{text[: most_characters - 3]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _require_regular(about: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(about.st_mode):
        raise OSError(errno.ELOOP, "is a link; put the file itself in its place", path)
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", path)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", path)

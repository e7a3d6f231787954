"""Safe reading of files that somebody else may have written, flushing, and locks; torch-free.

Opening a named pipe or a device may block for ever, and a link may point anywhere. Code that reads
a file of a checkpoint, a schedule or a log opens it here: only regular files are opened, and their
size is limited. `hold` locks a file or folder that only one run may write to.
"""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.1


def open_regular(path: str | Path, *, follow_links: bool = True) -> BinaryIO:
    """Open a regular file for reading; raises OSError if it is not one, and never blocks.

    Without `follow_links`, a symbolic link is refused too; links in parent folders are followed.
    """
    path = os.fspath(path)
    _require_regular(os.stat(path, follow_symlinks=follow_links), path)
    # The path may point to another file by now. O_NONBLOCK has no effect on a regular file.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    try:
        _require_regular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | Path, *, most_bytes: int, follow_links: bool = True) -> bytes:
    """The content of a regular file; raises OSError if it is not one, or exceeds `most_bytes`."""
    with open_regular(path, follow_links=follow_links) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes:,} bytes", os.fspath(path))
    return content


def flush(path: Path) -> None:
    """Flush to the disk what was written to a file, or the names of the files in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hold(descriptor: int, patience_seconds: float) -> bool:
    """Lock an open file or folder until it is closed or this process ends; False if that fails.

    If another process has the lock, wait up to `patience_seconds`, since the ranks of a killed run
    may take some time to end. On a file system without locks, always True.
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
    """A text from an untrusted file, made safe for an error message: short and on one line."""
    text = text if len(text) <= most_characters else f"{text[: most_characters - 3]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _require_regular(about: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(about.st_mode):
        raise OSError(errno.ELOOP, "is a link; replace it by the file itself", path)
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file", path)
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", path)

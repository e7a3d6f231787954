"""What this machine can run: its cores, its memory, and how many ranks may start here; torch-free.

All that starts ranks asks `check_local_ranks`. What torchrun starts is not counted: each machine is
told there how many it gets.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from titanlite.errors import ConfigError

MOST_RANKS_A_CORE = 32
# Measured with PyTorch 2.13 on Linux: after two steps of the smallest model a rank has 150 MB of
# its own. It shares the 230 MB of torch itself with the fork server that it comes from.
RANK_BYTES = 150 * 10**6
SERVER_BYTES = 230 * 10**6


def num_cores() -> int:
    """The CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory of the machine, or of the container it is. Not what is free: that changes."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container without a limit has "max" there, which is no number.
    with contextlib.suppress(OSError, ValueError):
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return whole


def most_local_ranks() -> int:
    """How many ranks the machine's cores and memory allow; at least 1."""
    by_memory = (memory_bytes() - SERVER_BYTES) // RANK_BYTES
    return max(1, min(by_memory, MOST_RANKS_A_CORE * num_cores()))


def check_local_ranks(
    num_ranks: int, *, allowed: int | None = None, key: str = "ranks", ways: str = ""
) -> None:
    """Raises ConfigError where `num_ranks` are more than may start on this machine.

    Those are `allowed` (job.max_local_ranks) or, where that is None, `most_local_ranks()`. The line
    begins with `key`, what the ranks were asked for by; `ways` is what can be done but give fewer.
    """
    most = most_local_ranks() if allowed is None else allowed
    if num_ranks <= most:
        return
    why = f"job.max_local_ranks is {most}"
    if allowed is None:
        why = (
            f"it takes {most} (at most {MOST_RANKS_A_CORE} on each of {num_cores()} cores, and "
            f"{RANK_BYTES // 10**6} MB for each of {memory_bytes() / 10**9:.0f} GB)"
        )
    raise ConfigError(
        f"{key}: {num_ranks} ranks are too many for this machine, as {why}; "
        f"give at most {most}{ways}"
    )

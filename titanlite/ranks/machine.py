"""The cores and the memory of this machine, and what it may run; torch-free.

All code that starts ranks calls `check_local_ranks`, and training also `check_local_memory`. The
number of ranks that torchrun starts is not limited: its command line gives it.
"""

import contextlib
import math
import os
from pathlib import Path

from titanlite.errors import ConfigError

MOST_RANKS_A_CORE = 32
# Measured with PyTorch 2.13 on Linux: after two steps of the smallest model, a rank has 150 MB of
# private memory. It shares the 230 MB of torch with the fork server.
RANK_BYTES = 150 * 10**6
SERVER_BYTES = 230 * 10**6
# Of a rank that is a thread: after three steps of four small MLPs under FSDP2 and TP, each of 256
# ranks had taken 1.1 MB.
THREAD_BYTES = 2 * 10**6
MOST_THREADS = 4096


def num_cores() -> int:
    """The CPU cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The total memory of the machine or container. Not the free memory, which changes."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # The file of a container without a limit holds "max", which is not a number.
    with contextlib.suppress(OSError, ValueError):
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return whole


def swap_bytes() -> int:
    """The swap space of the machine; 0 if it is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return 1024 * int(line.split()[1])
    return 0


def room_bytes(allowed_gb: float | None = None) -> float:
    """The bytes that ranks on CPU may take: `allowed_gb`, or the memory and swap."""
    return memory_bytes() + swap_bytes() if allowed_gb is None else allowed_gb * 1e9


def most_local_ranks() -> int:
    """The number of ranks that the machine's cores and memory allow; at least 1."""
    by_memory = (memory_bytes() - SERVER_BYTES) // RANK_BYTES
    return max(1, min(by_memory, MOST_RANKS_A_CORE * num_cores()))


def most_threads() -> int:
    """The number of ranks that may be threads of one process; at least 1."""
    return max(1, min((memory_bytes() - SERVER_BYTES) // THREAD_BYTES, MOST_THREADS))


def needs_threads(num_ranks: int, allowed: int | None = None) -> bool:
    """Whether so many ranks can only be threads; `allowed` processes are never too many."""
    return allowed is None and num_ranks > most_local_ranks()


def check_local_ranks(
    num_ranks: int,
    *,
    allowed: int | None = None,
    key: str = "ranks",
    ways: str = "",
    are_threads: bool = False,
) -> None:
    """Raises ConfigError if `num_ranks` exceeds the limit of this machine.

    The limit is `allowed` (job.max_local_ranks) or, if that is None, `most_local_ranks()`. The
    message starts with `key`, the key or option that asked for the ranks. `ways` is appended to the
    advice to give fewer. Threads of one process need little memory each.
    """
    by_machine = most_threads() if are_threads else most_local_ranks()
    most = by_machine if allowed is None else allowed
    if num_ranks <= most:
        return
    why = f"job.max_local_ranks is {most}"
    if allowed is None and are_threads:
        why = f"its limit is {most} ranks that are threads"
    elif allowed is None:
        why = (
            f"its limit is {most} ({MOST_RANKS_A_CORE} per core on {num_cores()} cores, and "
            f"{RANK_BYTES // 10**6} MB per rank in {memory_bytes() / 10**9:.0f} GB)"
        )
    raise ConfigError(
        f"{key}: {num_ranks} ranks are too many for this machine: {why}; give at most {most}{ways}"
    )


def check_local_memory(
    num_bytes: float, what: str, *, allowed_gb: float | None = None, key: str = "model"
) -> None:
    """Raises ConfigError if the ranks of this machine need more memory than it has.

    `num_bytes` is the least that `what` takes. `allowed_gb` is job.max_local_memory_gb.
    """
    if num_bytes <= room_bytes(allowed_gb):
        return
    limit = f"this machine has {room_bytes() / 1e9:.3g} GB"
    if allowed_gb is not None:
        limit = f"job.max_local_memory_gb is {allowed_gb:g}"
    raise ConfigError(
        f"{key}: {what} take at least {num_bytes / 1e9:.3g} GB on CPU, and {limit}; train a "
        f"smaller model or batch, start ranks with torchrun on more machines, or set "
        f"job.max_local_memory_gb = {math.ceil(num_bytes / 1e9)}"
    )

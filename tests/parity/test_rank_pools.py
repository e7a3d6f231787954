"""The ranks of a pool use one gloo device for all of their groups."""

import os
import sys
import time
from pathlib import Path

import pytest

from titanlite.ranks.world import World
from titanlite.tools.verify.pool import RankPool


def num_threads() -> int:
    """All threads but those in which a group runs its collectives."""
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum(name != "pt_gloo_runloop\n" for name in names)


def sums_and_threads(world: World) -> tuple[list[float], int]:
    """The sum of all ranks' numbers over each of three groups, and the threads that these add."""
    import torch
    import torch.distributed as dist

    sums, before = [], num_threads()
    for _ in range(3):
        number = torch.tensor(1.0 + world.rank)
        dist.all_reduce(number, group=dist.new_group([0, 1]))
        sums.append(number.item())
    # A thread gets its name a moment after it starts.
    deadline = time.monotonic() + 10
    while (more := num_threads() - before) and time.monotonic() < deadline:
        os.sched_yield()
    return sums, more


@pytest.mark.skipif(sys.platform != "linux", reason="the names of threads are in /proc")
def test_groups_share_a_device() -> None:
    with RankPool(2, timeout_seconds=120) as pool:
        assert pool.call(sums_and_threads) == [([3.0, 3.0, 3.0], 0)] * 2

"""Ranks that are started again meet those started with them, and nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from titanlite.errors import TitanliteError
from titanlite.mesh.attempt import agree_on_attempt


def agree(store: dist.Store, ranks: list[int], num_ranks: int = 3) -> list[str]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        names = [threads.submit(agree_on_attempt, store, rank, num_ranks, 20.0) for rank in ranks]
        return [name.result() for name in names]


def test_every_attempt_has_a_name_of_its_own():
    store = dist.HashStore()
    attempts = []
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        (name,) = set(agree(store, order))
        attempts.append(name)
        # One that asked and died, and one that died while it asked.
        store.set(f"attempt/asked/{store.add('attempt/asked', 1)}", "dead")
        store.add("attempt/asked", 1)
    assert len(set(attempts)) == 3


def test_a_rank_that_does_not_come_is_missed_in_time():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    with pytest.raises(TitanliteError, match=r"^1 of 3 ranks came within 0\.05 s"):
        agree_on_attempt(store, 0, 3, 0.05)

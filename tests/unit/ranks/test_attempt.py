"""Ranks that are started again meet those started with them, and nobody else."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from titanlite.ranks.attempt import agree_on_attempt


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


@pytest.mark.parametrize(
    ("here", "line"), [([0, 2], "ranks 1, 3 did not join"), ([1, 3], "rank 0 did not join")]
)
def test_ranks_that_do_not_come_are_named_in_time(here: list[int], line: str):
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    with ThreadPoolExecutor(len(here)) as threads:
        outcomes = [threads.submit(agree_on_attempt, store, rank, 4, 0.5) for rank in here]
    expected = f"{line} the rendezvous within 0.5 s (comm.init_timeout_seconds)"
    if 0 not in here:
        assert [str(outcome.exception()) for outcome in outcomes] == [expected] * len(here)
    else:
        # The others learn the name, and wait for their peers where the group is made.
        assert str(outcomes[0].exception()) == expected
        assert outcomes[1].exception() is None

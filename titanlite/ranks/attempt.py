"""A unique name for each attempt (start or restart) of a run, agreed on by all its ranks.

torchrun's agents keep one store across restarts, so it still holds the keys of dead ranks: old
addresses and old alarms. A new prefix per attempt separates them. An agent's restart count cannot
serve as that prefix, since agents count differently.
"""

import secrets
import time
from typing import Any

import torch.distributed as dist

from titanlite.errors import TitanliteError, number_ranks

POLL_SECONDS = 0.01


def agree_on_attempt(store: Any, rank: int, num_ranks: int, timeout_seconds: float) -> str:
    """The name of this attempt, the same on all `num_ranks` ranks; waits until all have joined.

    Each rank posts a request with a random token, and rank 0 writes its answer under each token.
    Requests left by an earlier attempt are answered too, but nobody reads those answers. Raises
    TitanliteError with the missing ranks after `timeout_seconds`, which must also be the timeout
    of `store`.
    """
    own = secrets.token_hex(8)
    if rank != 0:
        number = store.add("attempt/asked", 1)
        store.set(f"attempt/asked/{number}", own)
        try:
            name: str = store.get(f"attempt/answer/{own}").decode()
        except dist.DistStoreError:
            raise _not_come([0], timeout_seconds) from None
        store.set(f"attempt/{name}/came/{rank}", "")
        store.add(f"attempt/{name}/came", 1)
        return name
    deadline = time.monotonic() + timeout_seconds
    unanswered: set[int] = set()
    num_seen = 0
    while store.add(f"attempt/{own}/came", 0) < num_ranks - 1:
        num_asked = store.add("attempt/asked", 0)
        unanswered |= set(range(num_seen + 1, num_asked + 1))
        num_seen = num_asked
        for number in sorted(unanswered):
            # A rank that died between its two writes has left a number without a token.
            if store.check([f"attempt/asked/{number}"]):
                asker = store.get(f"attempt/asked/{number}").decode()
                store.set(f"attempt/answer/{asker}", own)
                unanswered.remove(number)
        if time.monotonic() > deadline:
            others = range(1, num_ranks)
            missing = [r for r in others if not store.check([f"attempt/{own}/came/{r}"])]
            raise _not_come(missing, timeout_seconds)
        time.sleep(POLL_SECONDS)
    return own


def _not_come(ranks: list[int], timeout_seconds: float) -> TitanliteError:
    return TitanliteError(
        f"{number_ranks(ranks)} did not join the rendezvous within {timeout_seconds:g} s "
        "(comm.init_timeout_seconds)"
    )

"""What PyTorch's CPU allocator counts while a function runs."""

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Change(NamedTuple):
    """An allocation (positive) or a release of `num_bytes` at an address, and who made it."""

    nanoseconds: int
    num_bytes: int
    address: int
    callers: tuple[str, ...]


def has_avx512_bf16() -> bool:
    """Whether oneDNN can take the scratch memory of the planner's table on this processor."""
    import torch

    return bool(torch.cpu.get_capabilities().get("avx512_bf16"))


def changes(function: Callable[[], Any]) -> list[Change]:
    """The allocations and releases of a call, in order."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    found, kept = [], []
    # Without acc_events, torch 2.11 warns.
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        kept.append(function())
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            callers, caller = [], event.parent
            while caller is not None:
                callers.append(caller.name)
                caller = caller.parent
            found.append(Change(event.start_time_ns, fields.alloc_size, fields.ptr, tuple(callers)))
    assert found
    return sorted(found)


def allocations(function: Callable[[], Any]) -> list[int]:
    """The bytes held beyond those at the start, after each allocation and release."""
    return list(itertools.accumulate(change.num_bytes for change in changes(function)))


# One whose releases count for the next, two measured, one that shows which releases were unseen.
PEAK_CALLS = 4


def peak_bounds(function: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes that a call holds beyond those at its start: bounds, from PEAK_CALLS calls.

    They are equal if all releases are known. After a collective, a thread of gloo drops its
    references to the tensors. If it is the last one to do so, the profiler does not see the
    release: a later allocation then has the same address, or none is ever seen. The upper bound
    counts these tensors until then, the lower one only when they are allocated.
    """
    calls = [changes(function) for _ in range(PEAK_CALLS)]
    starts = list(itertools.accumulate((len(call) for call in calls), initial=0))
    events = [change for call in calls for change in call]
    live: dict[int, int] = {}
    unseen: dict[int, int] = {}
    """Index of an allocation -> of the allocation that has its address next."""
    for index, change in enumerate(events):
        if change.num_bytes < 0:
            live.pop(change.address, None)
            continue
        if change.address in live:
            unseen[live[change.address]] = index
        live[change.address] = index
    unseen |= {index: len(events) for index in live.values() if index < starts[-2]}
    ended = {end: index for index, end in unseen.items()}
    low, high = 0, sys.maxsize
    # The profiler does not see releases, in the first call, of what was allocated before it.
    # What the last call has not released yet is not known to be unseen.
    for start, stop in itertools.pairwise(starts[1:-1]):
        least = most = held = held_at_most = 0
        for index in range(start, stop):
            change = events[index].num_bytes
            if start <= ended.get(index, -1):
                held_at_most -= events[ended[index]].num_bytes
            held, held_at_most = held + change, held_at_most + change
            least, most = max(least, held), max(most, held_at_most)
            if index in unseen:
                held -= change
        low, high = max(low, least), min(high, most)
    # Calls differ where gloo's thread drops a tensor earlier in one of them.
    return min(low, high), max(low, high)

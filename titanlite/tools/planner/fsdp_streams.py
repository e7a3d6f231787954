"""FSDP2's collectives in a trace of a CPU, as they run on the streams of a GPU; torch-free.

On a CPU, FSDP2 waits for each collective at once. On a GPU they have streams of their own, so the
main stream waits later (torch/distributed/fsdp/_fully_shard). Composed steps have this by
themselves (data_parallel.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from titanlite.tools.planner.events import TO_DEVICE, TO_HOST, Communication, Event, Operator, Wait

COPY_IN, COPY_OUT = "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy"
COPY_GRADIENTS = "fsdp::chunk_cat"


def on_streams(events: Iterable[Event]) -> list[Event]:
    """The events of a step, with FSDP2's waits where the main stream of a GPU has them.

    A gathered unit is waited for when it is copied out. In the forward pass a gather can start when
    the one before it has ended and the unit before that has been copied out of the buffer that both
    use. A reduction is waited for before that of the next unit, or at the end of the backward pass.

    With CPU offload, a gather comes after the copies of its shards to the device, and the copies of
    gradients to the host after their reduction and before the next one.
    """
    return list(_FsdpStreams().run(events))


class _FsdpStreams:
    def __init__(self) -> None:
        self._gathers: deque[int] = deque()
        # 0 for none, which no communication has.
        self._copied = self._copied_back = self._reduced = 0
        # Of a unit: its parameters and those of its experts have one each.
        self._reductions: list[Communication] = []
        self._moved: set[int] = set()
        self._last = ""
        self._ready = self._copied_out = -1
        self._count = 0

    def run(self, events: Iterable[Event]) -> Iterator[Event]:
        self._later = deque(events)
        while self._later:
            for one in self._next(self._later.popleft()):
                self._count += 1
                yield one

    def _next(self, event: Event) -> Iterator[Event]:
        if isinstance(event, Wait):
            if event.number not in self._moved:
                yield event
        elif isinstance(event, Communication):
            ready = self._ready if event.place.phase == "forward" else -1
            if event.kind == TO_DEVICE:
                event = replace(event, ready=ready, after=(self._copied,))
                self._copied = event.number
            elif event.kind == TO_HOST:
                event = replace(event, after=(self._copied_back or self._reduced,))
                self._copied_back = event.number
            elif self._last == COPY_IN:
                self._gathers.append(event.number)
                event = replace(event, ready=ready, after=(self._copied,))
                self._copied = 0
            elif self._last == COPY_GRADIENTS:
                event = replace(event, after=(self._copied_back,))
                self._reductions.append(event)
                self._reduced = event.number
            else:
                yield event
                return
            self._moved.add(event.number)
            yield event
        elif isinstance(event, Operator):
            self._last = event.name
            yield from self._operator(event)
        else:
            yield event

    def _operator(self, event: Operator) -> Iterator[Event]:
        if event.name == COPY_OUT and self._gathers:
            issued = self._count
            yield Wait(self._gathers.popleft())
            yield event
            if event.place.phase == "forward":
                self._ready = max(self._copied_out, issued if self._ready < 0 else 0)
                self._copied_out = self._count
            return
        is_update = event.place.phase == "optimizer"
        if is_update or (event.name == COPY_GRADIENTS and self._is_next_unit()):
            for one in self._reductions:
                yield Wait(one.number)
            self._reductions.clear()
        if self._copied_back and is_update:
            yield Wait(self._copied_back)
            self._copied_back = 0
        # The copy runs on the stream of the gather, if that starts ahead.
        is_of_gather = event.name == COPY_IN or self._copied > 0
        is_beside = is_of_gather and event.place.phase == "forward" and self._ready >= 0
        yield replace(event, is_beside=True) if is_beside else event

    def _is_next_unit(self) -> bool:
        """Whether what is reduced next is of another unit."""
        later = (one.place.module for one in self._later if isinstance(one, Communication))
        module = next(later, "")
        return all(one.place.module != module for one in self._reductions)

"""When a rank sent, received, gathered and reduced: read from the marks that torch leaves itself.

Each send, receive and collective of torch.distributed is a range of the profiler, from its call to
its end, whoever calls it: a pipeline's schedule, FSDP2, DTensor, compiled code. Of the profiler
only those ranges are switched on, so that a step runs as fast as without.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _profiler_enabled,
)
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)

from titanlite.schedule.timeline import EXCHANGE, GATHER, RECEIVE, REDUCE, SEND_TO

BACKENDS = ("gloo:", "nccl:")
# What a name holds -> what it is; the first that fits.
_KINDS = (
    ("recv", RECEIVE),
    ("send", SEND_TO),
    ("gather", GATHER),
    ("reduce", REDUCE),
    ("", EXCHANGE),
)


class Move(NamedTuple):
    """One send, receive or collective, in seconds of time.perf_counter."""

    kind: str
    start: float
    end: float


@contextlib.contextmanager
def recording_communication() -> Iterator[list[Move]]:
    """What this rank communicates inside; the list is filled when the block ends.

    A receive begins when it is posted, so its length is mostly waiting. A send is the moment it is
    posted: its range ends where the schedule asks for it, which may be at the end of the step. On
    CUDA a range is the call, not the transfer. Stays empty where another profiler is on.
    """
    moves: list[Move] = []
    if _profiler_enabled():
        yield moves
        return
    # Its start and its end are no news to a person.
    os.environ.setdefault("KINETO_LOG_LEVEL", "4")
    config = ProfilerConfig(
        ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig()
    )
    _prepare_profiler(config, {ProfilerActivity.CPU})
    # torch's own annotation lacks the scopes.
    enable: Any = _enable_profiler
    enable(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
    # The profiler's times are those of the wall clock.
    offset = time.perf_counter() - time.time()
    result = None
    try:
        yield moves
    finally:
        result = _disable_profiler()
    for event in result.events():
        name = event.name()
        if name.startswith(BACKENDS):
            kind, start = kind_of(name), 1e-9 * event.start_ns() + offset
            seconds = 0.0 if kind == SEND_TO else 1e-9 * event.duration_ns()
            moves.append(Move(kind, start, start + seconds))


def kind_of(name: str) -> str:
    """What a range named as "gloo:all_gather" is: one of the kinds of a timeline's lanes."""
    operation = name.partition(":")[2].lower()
    return next(kind for part, kind in _KINDS if part in operation)

"""Records when a rank sends, receives, gathers and reduces, from the profiler ranges of torch.

torch.distributed marks each send, receive and collective as a profiler range, whoever calls it: a
pipeline schedule, FSDP2, DTensor, compiled code. Only these ranges are recorded, so a step runs as
fast as without the profiler.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

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

from titanlite.ranks.settings import environment
from titanlite.schedule.walk import Span
from titanlite.tools.figures.timeline import EXCHANGE, GATHER, RECEIVE, REDUCE, SEND_TO

BACKENDS = ("gloo:", "nccl:")
# (Part of a range's name, its kind); the first match counts.
_KINDS = (
    ("recv", RECEIVE),
    ("send", SEND_TO),
    ("gather", GATHER),
    ("reduce", REDUCE),
    ("", EXCHANGE),
)


@contextlib.contextmanager
def recording_communication(row: int = 0) -> Iterator[list[Span]]:
    """Records what this rank communicates inside; the list is filled when the block ends.

    Times are in seconds of time.perf_counter. `row` is the rank's in a timeline.
    A receive starts when it is posted, so most of its time is waiting. A send has length zero at
    the time it is posted, because its range ends when the schedule waits for it, possibly at the
    end of the step. On CUDA a range is the call, not the transfer. The list stays empty if another
    profiler is running.
    """
    moves: list[Span] = []
    if _profiler_enabled():
        yield moves
        return
    config = ProfilerConfig(
        ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig()
    )
    # Hide Kineto's messages about the start and end of profiling.
    with environment(KINETO_LOG_LEVEL="4"):
        _prepare_profiler(config, {ProfilerActivity.CPU})
        # torch's type annotation lacks the argument for scopes.
        enable: Any = _enable_profiler
        enable(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
        # The profiler's times are wall-clock times.
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
            moves.append(Span(row, start, start + seconds, kind))


def kind_of(name: str) -> str:
    """The kind of a range with a name such as "gloo:all_gather": one of a timeline's lanes."""
    operation = name.partition(":")[2].lower()
    return next(kind for part, kind in _KINDS if part in operation)

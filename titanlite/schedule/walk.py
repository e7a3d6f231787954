"""Execute a schedule on the clock: each rank advances until it ends or is blocked.

`check` reports in one line why a schedule cannot run: the action at which each rank is blocked, or
the work that is missing. `run_schedule` returns the times of a schedule that runs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    Schedule,
    ScheduleError,
)
from titanlite.schedule.clock import TimedAction, run


class Span(NamedTuple):
    """`kind` ran on `row` from `start` to `end`, for `stage` and `microbatch` (may be None)."""

    row: int
    start: float
    end: float
    kind: str
    stage: int | None = None
    microbatch: int | None = None


WORK = frozenset("FBIW")  # the kinds that compute; the others move data


def in_steps(rank: int, action: Action) -> float:
    """Durations as in the pipelining papers: a full backward takes 2 steps, other work takes 1."""
    return 2 if action.kind == FULL_BACKWARD else float(action.kind in COMPUTE_KINDS)


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless every rank finishes and all work is done exactly once.

    The message names the blocked action of each rank and what it waits for, or the stages and
    microbatches whose forward or backward is missing, repeated, or on the wrong rank.
    """
    problems = list(_find_wrong_work(schedule))
    if problems:
        shown = "; ".join(problems[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ScheduleError(f"{schedule.name} is not a valid schedule: {shown}{more}")
    run_schedule(schedule)


_SHOWN = 4


def run_schedule(
    schedule: Schedule, duration: Callable[[int, Action], float] = in_steps
) -> list[Span]:
    """The times of all compute actions if each starts once its rank is free and its inputs exist.

    `duration(rank, action)` is how long an action takes. Raises ScheduleError if a rank is blocked
    forever.
    """
    sends = any(action.kind in COMMUNICATION_KINDS for row in schedule.actions for action in row)
    queues = [[part for action in row for part in action.parts] for row in schedule.actions]
    rows = [
        [
            TimedAction(duration(rank, action), _needs(action, schedule, sends), _completes(action))
            for action in queue
        ]
        for rank, queue in enumerate(queues)
    ]
    ran, _, blocked = run(rows)
    stuck = []
    for rank, number, need in blocked:
        assert isinstance(need, Action)
        what = str(need)
        if need.kind == BACKWARD_INPUT:  # may be part of a full backward on that stage
            what = f"the backward of stage {need.stage} for microbatch {need.microbatch}"
        stuck.append(f"rank {rank} at {queues[rank][number]}, which waits for {what}")
    if stuck:
        raise ScheduleError(f"{schedule.name} deadlocks: " + "; ".join(stuck))
    return [
        Span(rank, start, end, action.kind, action.stage, action.microbatch)
        for rank, number, start, end in ran
        for action in [queues[rank][number]]
        if end > start
    ]


def bubbles(num_rows: int, spans: Collection[Span]) -> list[float]:
    """The bubble fraction of each row: its idle share of the time of all rows."""
    start = min((span.start for span in spans), default=0.0)
    whole = max((span.end for span in spans), default=0.0) - start
    busy, reached = [0.0] * num_rows, [start] * num_rows
    for span in sorted(spans, key=lambda span: span.start):
        if span.kind in WORK:
            busy[span.row] += max(0, span.end - max(reached[span.row], span.start))
            reached[span.row] = max(reached[span.row], span.end)
    return [1 - time / whole if whole else 0.0 for time in busy]


def _needs(action: Action, schedule: Schedule, sends: bool) -> list[Action]:
    """The actions that must end before `action` can start, on any rank.

    Other stages wait only for the input gradient of a backward pass, so a full backward also
    counts as an input gradient here (see `_completes`).
    """
    stage, kind, microbatch, _ = action
    place = schedule.stage_to_rank
    if kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT):
        is_forward = kind == FORWARD
        needs = [] if is_forward else [Action(stage, FORWARD, microbatch)]
        before = stage - 1 if is_forward else stage + 1
        if not 0 <= before < schedule.num_stages:
            return needs
        if sends and place[before] != place[stage]:
            return [*needs, Action(stage, RECV_F if is_forward else RECV_B, microbatch)]
        return [*needs, Action(before, FORWARD if is_forward else BACKWARD_INPUT, microbatch)]
    if kind in (BACKWARD_WEIGHT, SEND_B):
        return [Action(stage, BACKWARD_INPUT, microbatch)]
    if kind == SEND_F:
        return [Action(stage, FORWARD, microbatch)]
    if kind == RECV_F:
        return [Action(stage - 1, SEND_F, microbatch)]
    return [Action(stage + 1, SEND_B, microbatch)] if kind == RECV_B else []


def _completes(action: Action) -> tuple[Action, ...]:
    if action.kind == FULL_BACKWARD:
        return action, Action(action.stage, BACKWARD_INPUT, action.microbatch)
    return (action,)


def _find_wrong_work(schedule: Schedule) -> Iterator[str]:
    last = schedule.num_stages - 1
    counts: Counter[tuple[int, int | None, str]] = Counter()
    for rank in range(schedule.num_ranks):
        for action in schedule.compute(rank):
            stage, kind, microbatch, _ = action
            if stage > last or not 0 <= (microbatch or 0) < schedule.num_microbatches:
                yield f"{action} on rank {rank} is outside the schedule's {last + 1} stages"
                continue
            if schedule.stage_to_rank[stage] != rank:
                place = schedule.stage_to_rank[stage]
                yield f"{action} is on rank {rank}, but its stage is on rank {place}"
            counts[stage, microbatch, kind] += 1
            if counts[stage, microbatch, kind] == 2:
                yield f"{action} runs twice"
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            forward, full, inputs, weights = (
                counts[stage, microbatch, kind]
                for kind in (FORWARD, FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
            )
            if not forward:
                yield f"{Action(stage, FORWARD, microbatch)} is missing"
            if not full and not inputs:
                yield f"the backward of stage {stage} for microbatch {microbatch} is missing"
            elif full and (inputs or weights):
                yield f"the backward of stage {stage} for microbatch {microbatch} runs twice"
            elif inputs and not weights:
                yield f"{Action(stage, BACKWARD_WEIGHT, microbatch)} is missing"

"""Execute a schedule symbolically: each rank advances until it ends or is blocked.

`check` reports in one line why a schedule cannot run: the action at which each rank is blocked, or
the work that is missing. `walk` returns the times of a schedule that runs, for drawing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMMUNICATION_KINDS,
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
from titanlite.schedule.timeline import Span, Timeline, activation_curves

# Durations in steps. As in the pipelining papers, a full backward takes twice a forward.
STEPS: Mapping[str, float] = {FORWARD: 1, FULL_BACKWARD: 2, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: 1}


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
    _run(schedule, STEPS)


def walk(schedule: Schedule, durations: Mapping[str, float] = STEPS) -> Timeline:
    """The times of all compute actions if each starts once its rank is free and its inputs exist.

    `durations` maps kinds to steps; a kind not in it takes no time. Raises ScheduleError if a rank
    is blocked forever.
    """
    spans = _run(schedule, durations)
    rows = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    curves = activation_curves(rows, spans)
    return Timeline(
        schedule.name, rows, spans, curves=curves, curves_label="activations held, by rank"
    )


_SHOWN = 4


def _run(schedule: Schedule, durations: Mapping[str, float]) -> list[Span]:
    sends = any(action.kind in COMMUNICATION_KINDS for row in schedule.actions for action in row)
    queues = [[part for action in row for part in action.parts] for row in schedule.actions]
    position = [0] * len(queues)
    clock: list[float] = [0.0] * len(queues)
    ended: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}
    spans: list[Span] = []
    runnable = list(range(len(queues)))[::-1]
    while runnable:
        rank = runnable.pop()
        queue = queues[rank]
        while position[rank] < len(queue):
            action = queue[position[rank]]
            needs = _needs(action, schedule, sends)
            missing = next((need for need in needs if need not in ended), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start = max([clock[rank], *(ended[need] for need in needs)])
            end = start + durations.get(action.kind, 0)
            clock[rank] = end
            position[rank] += 1
            if end > start:
                spans.append(Span(rank, start, end, action.kind, action.stage, action.microbatch))
            for done in _completes(action):
                ended[done] = end
                runnable += waiting.pop(done, ())
    stuck = []
    for rank, (queue, at) in enumerate(zip(queues, position, strict=True)):
        if at < len(queue):
            need = next(n for n in _needs(queue[at], schedule, sends) if n not in ended)
            what = str(need)
            if need.kind == BACKWARD_INPUT:  # may be part of a full backward on that stage
                what = f"the backward of stage {need.stage} for microbatch {need.microbatch}"
            stuck.append(f"rank {rank} at {queue[at]}, which waits for {what}")
    if stuck:
        raise ScheduleError(f"{schedule.name} deadlocks: " + "; ".join(stuck))
    return spans


def _needs(action: Action, schedule: Schedule, sends: bool) -> list[Action]:
    """The actions that must end before `action` can start, on any rank.

    Other stages wait only for the input gradient of a backward pass, so a full backward also
    counts as an input gradient here (see `_completes`).
    """
    stage, kind, microbatch, _ = action
    place, last = schedule.stage_to_rank, schedule.num_stages - 1
    if kind == FORWARD:
        if stage == 0:
            return []
        if sends and place[stage - 1] != place[stage]:
            return [Action(stage, RECV_F, microbatch)]
        return [Action(stage - 1, FORWARD, microbatch)]
    if kind in (FULL_BACKWARD, BACKWARD_INPUT):
        own = Action(stage, FORWARD, microbatch)
        if stage == last:
            return [own]
        if sends and place[stage + 1] != place[stage]:
            return [own, Action(stage, RECV_B, microbatch)]
        return [own, Action(stage + 1, BACKWARD_INPUT, microbatch)]
    if kind in (BACKWARD_WEIGHT, SEND_B):
        return [Action(stage, BACKWARD_INPUT, microbatch)]
    if kind == SEND_F:
        return [Action(stage, FORWARD, microbatch)]
    if kind == RECV_F:
        return [Action(stage - 1, SEND_F, microbatch)]
    if kind == RECV_B:
        return [Action(stage + 1, SEND_B, microbatch)]
    return []


def _completes(action: Action) -> tuple[Action, ...]:
    if action.kind == FULL_BACKWARD:
        return action, Action(action.stage, BACKWARD_INPUT, action.microbatch)
    return (action,)


def _find_wrong_work(schedule: Schedule) -> Iterator[str]:
    last = schedule.num_stages - 1
    counts: dict[tuple[int, int | None, str], int] = {}
    for rank in range(schedule.num_ranks):
        for action in schedule.compute(rank):
            stage, kind, microbatch, _ = action
            if stage > last or not 0 <= (microbatch or 0) < schedule.num_microbatches:
                yield f"{action} on rank {rank} is outside the schedule's {last + 1} stages"
                continue
            if schedule.stage_to_rank[stage] != rank:
                place = schedule.stage_to_rank[stage]
                yield f"{action} is on rank {rank}, but its stage is on rank {place}"
            key = stage, microbatch, kind
            counts[key] = counts.get(key, 0) + 1
            if counts[key] == 2:
                yield f"{action} runs twice"
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            forward, full, inputs, weights = (
                counts.get((stage, microbatch, kind), 0)
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

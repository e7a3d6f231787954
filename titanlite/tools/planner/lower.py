"""Lower compute actions to the full table that PyTorch's pipeline runtime executes.

Three passes add unshard and reshard for FSDP, one gradient reduction per stage after its last
backward, and a send and a receive for every edge between ranks. Each pass gives the same actions
as its counterpart in `torch.distributed.pipelining`, in time linear in the number of actions.
"""

from dataclasses import replace

from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    RESHARD,
    SEND_B,
    SEND_F,
    UNSHARD,
    Action,
    Schedule,
    ScheduleError,
)


def add_communication(schedule: Schedule, max_active_stages: int = 3) -> Schedule:
    """Add all communication to `schedule`, which holds only compute actions.

    A rank keeps at most `max_active_stages` of its stages unsharded: those it needs next. Raises
    ScheduleError if the compute actions deadlock.
    """
    rows = [
        _add_reduction(_add_unshard(row, max_active_stages), schedule.num_microbatches)
        for row in schedule.actions
    ]
    return add_sends_and_receives(replace(schedule, actions=rows))


def add_sends_and_receives(schedule: Schedule) -> Schedule:
    """Add a SEND and a RECV for each activation and gradient that moves between ranks.

    All ranks advance together, one action per round, rank 0 first. A send directly follows the
    action that produces its data, and the receive is appended to the other rank's list at the same
    moment. Both ends therefore post their transfers in the same order, so they cannot hang.
    Raises ScheduleError if no rank can advance.
    """
    place, last = schedule.stage_to_rank, schedule.num_stages - 1
    microbatches = schedule.num_microbatches
    # Index stage * microbatches + m: whether the input of this pass has reached the stage's rank.
    forward_ready = bytearray(b"\1" * microbatches + bytes(last * microbatches))
    backward_ready = bytearray(bytes(last * microbatches) + b"\1" * microbatches)
    waiting = [iter(row) for row in schedule.actions]
    heads = [next(actions, None) for actions in waiting]
    rows: list[list[Action]] = [[] for _ in heads]
    ranks = [rank for rank, head in enumerate(heads) if head is not None]

    def is_ready(action: Action) -> bool:
        if action.kind == FORWARD:
            return bool(forward_ready[action.stage * microbatches + action.microbatch])  # type: ignore[operator]
        if action.kind in (FULL_BACKWARD, BACKWARD_INPUT):
            return bool(backward_ready[action.stage * microbatches + action.microbatch])  # type: ignore[operator]
        return True

    while ranks:
        progress = ended = False
        for rank in ranks:
            head = heads[rank]
            assert head is not None
            parts = head.sub_actions or (head,)
            if not all(map(is_ready, parts)):
                continue
            progress = True
            row = rows[rank]
            row.append(head)
            for stage, kind, microbatch, _ in parts:
                if kind == FORWARD:
                    if stage == last:
                        continue
                    other, send, receive, ready = stage + 1, SEND_F, RECV_F, forward_ready
                elif kind in (FULL_BACKWARD, BACKWARD_INPUT):
                    if stage == 0:
                        continue
                    other, send, receive, ready = stage - 1, SEND_B, RECV_B, backward_ready
                else:
                    continue
                ready[other * microbatches + microbatch] = 1  # type: ignore[operator]
                if place[other] != place[stage]:
                    row.append(Action(stage, send, microbatch))
                    rows[place[other]].append(Action(other, receive, microbatch))
            heads[rank] = next(waiting[rank], None)
            ended = ended or heads[rank] is None
        if not progress:
            stuck = ", ".join(f"rank {rank} at {heads[rank]}" for rank in ranks)
            raise ScheduleError(
                f"{schedule.name} deadlocks, its ranks wait for each other: {stuck}"
            )
        if ended:
            ranks = [rank for rank in ranks if heads[rank] is not None]
    return replace(schedule, actions=rows)


def _add_unshard(row: list[Action], max_active_stages: int) -> list[Action]:
    """Add UNSHARD when a stage becomes one of the next to compute, RESHARD when it no longer is."""
    lowered: list[Action] = []
    active: set[int] = set()
    for action, upcoming in zip(row, _upcoming_stages(row), strict=True):
        wanted = upcoming[:max_active_stages]
        if active != set(wanted):
            for stage in [stage for stage in active if stage not in wanted]:
                active.remove(stage)
                lowered.append(Action(stage, RESHARD))
            for stage in wanted:
                if stage not in active:
                    active.add(stage)
                    lowered.append(Action(stage, UNSHARD))
        lowered.append(action)
    lowered += [Action(stage, RESHARD) for stage in active]
    return lowered


def _upcoming_stages(row: list[Action]) -> list[list[int]]:
    """For each position in `row`, the stages that compute from there on, soonest first."""
    stages: list[int] = []
    result = []
    for action in reversed(row):
        for part in reversed(action.parts):
            if not stages or stages[0] != part.stage:
                stages = [part.stage, *(stage for stage in stages if stage != part.stage)]
        result.append(stages)
    return result[::-1]


def _add_reduction(row: list[Action], num_microbatches: int) -> list[Action]:
    """Add REDUCE_GRAD for each stage directly after the backward that completes its gradient."""
    lowered: list[Action] = []
    done: dict[int, int] = {}
    for action in row:
        lowered.append(action)
        for part in action.parts:
            if part.kind in (FULL_BACKWARD, BACKWARD_WEIGHT):
                done[part.stage] = done.get(part.stage, 0) + 1
                if done[part.stage] == num_microbatches:
                    lowered.append(Action(part.stage, REDUCE_GRAD))
    return lowered

"""Generate pipeline schedules by name: `make_schedule("1F1B", num_ranks=4, num_microbatches=8)`.

Each generator returns the compute actions of one rank, without idle steps. Where
`torch.distributed.pipelining` implements the same schedule, the order is the same. Durations are
not part of a schedule; they come from a real run or from `titanlite.tools.simulate`.
"""

import contextlib
import difflib
import gc
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Action,
    Schedule,
    ScheduleError,
)
from titanlite.schedule.v_shaped import dual_pipe_v, zbv


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int | None = None
) -> Schedule:
    """The compute actions of every rank under schedule `name` (a key of `SCHEDULES`, any case).

    `num_chunks` is the number of stages per rank; the default is the smallest the schedule allows.
    Raises ScheduleError for an unknown name (with the closest known ones), and for counts that the
    schedule does not support.
    """
    name = schedule_name(name)
    kind = SCHEDULES[name]
    num_chunks = kind.min_chunks if num_chunks is None else num_chunks
    _check_counts(name, kind, num_ranks, num_microbatches, num_chunks)
    # Millions of actions are made, and no cycles: the collector would only visit them all.
    with without_garbage_collection():
        actions = [
            kind.rank_actions(rank, num_ranks, num_microbatches, num_chunks)
            for rank in range(num_ranks)
        ]
    stage_to_rank = _place_stages(num_ranks, num_chunks, kind.v_shaped)
    return Schedule(name, num_microbatches, stage_to_rank, actions)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, Python collects no garbage by itself."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def schedule_name(name: str) -> str:
    """The key of `SCHEDULES` for `name`, which may be in any case or a common alias.

    Raises ScheduleError for an unknown name.
    """
    known = {known.lower(): known for known in SCHEDULES} | _ALIASES
    try:
        return known[name.lower()]
    except KeyError:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(dict.fromkeys(known[n] for n in near))}?" if near else ""
        raise ScheduleError(
            f"there is no schedule {name!r}; {hint or 'choose from ' + ', '.join(SCHEDULES)}"
        ) from None


class ScheduleKind(NamedTuple):
    """The generator of a schedule and the counts it supports.

    The generator is called as `rank_actions(rank, ranks, microbatches, chunks)`.
    """

    rank_actions: Callable[[int, int, int, int], list[Action]]
    min_chunks: int = 1
    max_chunks: int | None = 1
    v_shaped: bool = False
    in_rounds: bool = False  # microbatches must divide into max(1, microbatches // ranks) rounds
    fills_pipeline: bool = False  # needs at least as many microbatches as stages


def _check_counts(
    name: str, kind: ScheduleKind, ranks: int, microbatches: int, chunks: int
) -> None:
    for what, count in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if count < 1:
            raise ScheduleError(f"{name}: the number of {what} is {count}; it must be at least 1")
    most = chunks if kind.max_chunks is None else kind.max_chunks
    if not kind.min_chunks <= chunks <= most:
        raise ScheduleError(
            f"{name} needs {kind.min_chunks}{'' if kind.max_chunks else ' or more'} stages per "
            f"rank, not {chunks}"
        )
    rounds = max(1, microbatches // ranks)
    if kind.in_rounds and microbatches % rounds:
        raise ScheduleError(
            f"{name} runs {microbatches} microbatches on {ranks} ranks in {rounds} rounds, and all "
            f"rounds must have the same size; use {microbatches // rounds * rounds} or "
            f"{-(-microbatches // ranks) * ranks} microbatches"
        )
    if kind.fills_pipeline and microbatches < ranks * chunks:
        raise ScheduleError(
            f"{name} needs at least as many microbatches as stages ({ranks * chunks}), "
            f"not {microbatches}"
        )


def _place_stages(num_ranks: int, num_chunks: int, v_shaped: bool) -> tuple[int, ...]:
    there = tuple(range(num_ranks))
    back = there[::-1] if v_shaped else there
    return tuple(rank for chunk in range(num_chunks) for rank in (back if chunk % 2 else there))


def _gpipe(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Huang et al. 2019, https://arxiv.org/abs/1811.06965."""
    forwards = [Action(rank, FORWARD, m) for m in range(microbatches)]
    return forwards + [Action(rank, FULL_BACKWARD, m) for m in range(microbatches)]


def _looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Lamy-Poirier 2022, https://arxiv.org/abs/2211.05953; backwards run in reverse order."""
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action(s, FORWARD, m) for s in stages for m in range(microbatches)]
    return forwards + [
        Action(s, FULL_BACKWARD, m) for s in reversed(stages) for m in reversed(range(microbatches))
    ]


def _one_forward_one_backward(
    rank: int, ranks: int, microbatches: int, chunks: int
) -> list[Action]:
    """Narayanan et al. 2020 (PipeDream-Flush), https://arxiv.org/abs/2006.09503."""
    return _alternate(
        [Action(rank, FORWARD, m) for m in range(microbatches)],
        [Action(rank, FULL_BACKWARD, m) for m in range(microbatches)],
        warmup=ranks - 1 - rank,
    )


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2."""
    per_round = microbatches // max(1, microbatches // ranks)
    return _alternate(
        _in_rounds(FORWARD, rank, ranks, microbatches, chunks),
        _in_rounds(FULL_BACKWARD, rank, ranks, microbatches, chunks),
        warmup=(chunks - 1) * per_round + 2 * (ranks - 1 - rank),
    )


def _interleaved_zero_bubble(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Qi et al. 2023, https://arxiv.org/abs/2401.10241: ZB-H1 with several stages per rank."""
    per_round = microbatches // max(1, microbatches // ranks)
    return _alternate(
        _in_rounds(FORWARD, rank, ranks, microbatches, chunks),
        _in_rounds(BACKWARD_INPUT, rank, ranks, microbatches, chunks),
        warmup=(chunks - 1) * per_round + (ranks - 1 - rank),
        weights=_in_rounds(BACKWARD_WEIGHT, rank, ranks, microbatches, chunks),
        weights_behind=rank,
    )


def _zb_h1(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Qi et al. 2023, https://arxiv.org/abs/2401.10241, figure 2: the memory of 1F1B."""
    return _zero_bubble(rank, microbatches, warmup=ranks - rank, weights_behind=rank)


def _zb_h2(rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Qi et al. 2023, https://arxiv.org/abs/2401.10241, figure 3: about twice 1F1B's memory."""
    return _zero_bubble(rank, microbatches, warmup=2 * (ranks - rank) - 1, weights_behind=2 * rank)


def _zero_bubble(rank: int, microbatches: int, warmup: int, weights_behind: int) -> list[Action]:
    return _alternate(
        [Action(rank, FORWARD, m) for m in range(microbatches)],
        [Action(rank, BACKWARD_INPUT, m) for m in range(microbatches)],
        warmup=warmup - 1,  # _alternate runs one more forward before the first backward
        weights=[Action(rank, BACKWARD_WEIGHT, m) for m in range(microbatches)],
        weights_behind=weights_behind,
    )


def _in_rounds(kind: str, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Actions of `kind` in rounds of microbatches.

    Each round goes through the rank's chunks in order (in reverse order for a backward).
    """
    per_round = microbatches // max(1, microbatches // ranks)
    order = range(chunks) if kind == FORWARD else range(chunks - 1, -1, -1)
    return [
        Action(chunk * ranks + rank, kind, m)
        for first in range(0, microbatches, per_round)
        for chunk in order
        for m in range(first, first + per_round)
    ]


def _alternate(
    forwards: list[Action],
    backwards: list[Action],
    warmup: int,
    weights: list[Action] | None = None,
    weights_behind: int = 0,
) -> list[Action]:
    """`warmup` forwards, then alternating forwards and backwards, then the remaining backwards.

    With `weights`, one weight gradient follows each backward except the first `weights_behind`
    ones, and the remaining weight gradients run at the end.
    """
    warmup = min(warmup, len(forwards))
    row = forwards[:warmup]
    steady = len(forwards) - warmup
    if weights is None:
        pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
        return row + list(chain.from_iterable(pairs)) + backwards[steady:]
    done = 0
    for i, backward in enumerate(backwards):
        if i < steady:
            row.append(forwards[warmup + i])
        row.append(backward)
        if i >= weights_behind:
            row.append(weights[done])
            done += 1
    return row + weights[done:]


SCHEDULES: dict[str, ScheduleKind] = {
    "GPipe": ScheduleKind(_gpipe),
    "1F1B": ScheduleKind(_one_forward_one_backward),
    "Interleaved1F1B": ScheduleKind(_interleaved, 2, None, in_rounds=True),
    "LoopedBFS": ScheduleKind(_looped_bfs, 2, None),
    "ZB-H1": ScheduleKind(_zb_h1),
    "ZB-H2": ScheduleKind(_zb_h2),
    "InterleavedZeroBubble": ScheduleKind(_interleaved_zero_bubble, 2, None, in_rounds=True),
    "ZBVZeroBubble": ScheduleKind(zbv, 2, 2, v_shaped=True),
    "DualPipeV": ScheduleKind(dual_pipe_v, 2, 2, v_shaped=True, fills_pipeline=True),
}
_ALIASES = {
    "zbv": "ZBVZeroBubble",
    "zbh1": "ZB-H1",
    "zbh2": "ZB-H2",
    "interleaved": "Interleaved1F1B",
}

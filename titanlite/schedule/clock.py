"""The clock of a schedule: each rank runs its actions in order, each as soon as it can.

`run_schedule` runs the actions of a schedule on it, and the planner those of a composed step.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple


class TimedAction(NamedTuple):
    """An action on the clock: it starts when its rank is free and all that it `needs` was given.

    After `duration` it gives what it `gives`. With a `channel` it is a send: it runs beside the
    other actions of its rank, after what the channel has sent before.
    """

    duration: float
    needs: Sequence[Hashable] = ()
    gives: Sequence[Hashable] = ()
    channel: Hashable = None


class Interval(NamedTuple):
    """Action `number` of `rank` ran from `start` to `end`."""

    rank: int
    number: int
    start: float
    end: float


def run(
    rows: Sequence[Sequence[TimedAction]],
    on_wait: Callable[[int, Hashable, float, Interval], None] = lambda rank, need, now, giver: None,
) -> tuple[list[Interval], list[float], list[tuple[int, int, Hashable]]]:
    """Run the actions of each rank from time 0, until all have ended or are blocked forever.

    Returns the actions that ran, until when each rank works, and (rank, number, need) of each one
    that is blocked. `on_wait(rank, need, now, giver)` is told of each wait for what another action,
    the giver, gives later.
    """
    ran: list[Interval] = []
    free, at = [0.0] * len(rows), [0] * len(rows)
    given: dict[Hashable, Interval] = {}
    sent_until: dict[Hashable, float] = {}
    waiting: dict[Hashable, list[int]] = {}
    runnable = list(range(len(rows)))[::-1]
    while runnable:
        rank = runnable.pop()
        now = free[rank]
        for number in range(at[rank], len(rows[rank])):
            duration, needs, gives, channel = rows[rank][number]
            givers = [given[need] for need in needs if need in given]
            if len(givers) < len(needs):
                missing = next(need for need in needs if need not in given)
                waiting.setdefault(missing, []).append(rank)
                break
            for need, giver in zip(needs, givers, strict=True):
                if giver.end > now:
                    on_wait(rank, need, now, giver)
                    now = giver.end
            start = now if channel is None else max(now, sent_until.get(channel, 0.0))
            done = Interval(rank, number, start, start + duration)
            if channel is None:
                now = done.end
            else:
                sent_until[channel] = done.end
            ran.append(done)
            at[rank] = number + 1
            for key in gives:
                given[key] = done
                runnable += waiting.pop(key, ())
        free[rank] = now
    stuck = sorted((rank, at[rank], need) for need, ranks in waiting.items() for rank in ranks)
    return ran, free, stuck

"""The time of a composed step: what each action takes, and the pipeline's clock. Torch-free.

    Compositions + Cost -> predict -> Prediction

The events of an action run on the streams of one rank (timing.py), once for all actions that are
alike. The ranks of a pipeline then run their actions in the schedule's order, each as soon as its
rank is free and its input has arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from titanlite.config import ResolvedJob
from titanlite.errors import TitanliteError
from titanlite.plan.compose import BATCH, END, START, Composition, Done
from titanlite.plan.composition import Pieces, Segment
from titanlite.plan.cost import Cost
from titanlite.plan.timing import SegmentTime, StepTime, Traffic, step_time, time_events
from titanlite.schedule import Span, Timeline
from titanlite.schedule.actions import (
    BACKWARD_INPUT,
    FORWARD,
    FULL_BACKWARD,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    UNSHARD,
)

BACKWARDS = (FULL_BACKWARD, BACKWARD_INPUT)
SPAN_KINDS = {UNSHARD: "FETCH", REDUCE_GRAD: "REDUCE_GRAD"}


class Ran(NamedTuple):
    """An action of the rank at `place` on pp, from `start` to `end`; a send takes its transfer."""

    place: int
    start: float
    end: float
    done: Done


@dataclass(frozen=True)
class Prediction:
    """The predicted time of a step, and what each rank does when.

    `timeline` has the work of a pipeline's ranks; `actions` has all actions, in the order in which
    they start on each rank.
    """

    step: StepTime
    timeline: Timeline
    bubble: float
    """The share of the step in which a rank waits for another, the mean over the pipeline."""
    actions: list[Ran] = field(default_factory=list, repr=False)


def predict(
    resolved: ResolvedJob, compositions: Sequence[Composition], cost: Cost, pieces: Pieces
) -> Prediction:
    """The time of a step; `compositions` has one rank of every stage of the pipeline, in order."""
    clock = _Clock(compositions, cost)
    seconds = clock.run()
    segments = {one.rank: clock.rank_time(place, seconds) for place, one in enumerate(compositions)}
    tokens = resolved.global_batch_size * resolved.seq_len
    step = step_time(
        segments,
        cost,
        tokens=tokens,
        model_flops=pieces.flops_per_token and pieces.flops_per_token * tokens,
        dtype=resolved.config.training.param_dtype,
    )
    rows = [f"rank {one.rank}" for one in compositions]
    idle = [segment.idle_seconds / seconds if seconds else 0.0 for segment in segments.values()]
    timeline = Timeline("predicted step", rows, clock.spans, unit="s")
    return Prediction(step, timeline, sum(idle) / len(idle), clock.actions)


class _Clock:
    """Runs the actions of all ranks of a pipeline in virtual time."""

    def __init__(self, compositions: Sequence[Composition], cost: Cost) -> None:
        self._compositions, self._cost = compositions, cost
        self._known: dict[int, SegmentTime] = {}
        self._place_of = {
            done.stage: place
            for place, one in enumerate(compositions)
            for done in one.actions
            if done.stage >= 0
        }
        self.spans: list[Span] = []
        self.actions: list[Ran] = []
        # Seconds in which a rank waits for a transfer that is under way, by rank, kind and phase.
        self._exposed: dict[tuple[int, str, str], float] = defaultdict(float)

    def time(self, segment: Segment, rank: int) -> SegmentTime:
        """The time of a segment; equal for all ranks of a stage."""
        if id(segment) not in self._known:
            self._known[id(segment)] = time_events(segment.events, self._cost, rank)
        return self._known[id(segment)]

    def run(self) -> float:
        """The seconds of the step."""
        lists = [one.actions for one in self._compositions]
        at = [0] * len(lists)
        clock = [0.0] * len(lists)
        arrived: dict[tuple[str, int, int], tuple[float, float]] = {}
        free: dict[tuple[int, str], float] = defaultdict(float)
        waiting: dict[tuple[str, int, int], int] = {}
        runnable = list(range(len(lists)))[::-1]
        while runnable:
            place = runnable.pop()
            actions = lists[place]
            rank = self._compositions[place].rank
            while at[place] < len(actions) and actions[at[place]].kind != END:
                done = actions[at[place]]
                need = self._need(done, place)
                if need is not None and need not in arrived:
                    waiting[need] = place
                    break
                at[place] += 1
                if done.kind in (RECV_F, RECV_B):
                    continue
                of = self.time(done.segment, rank)
                if done.kind in (SEND_F, SEND_B):
                    # A send runs beside the work; the next one on its link waits for it.
                    begins = max(clock[place], free[place, done.kind])
                    ends = begins + sum(one.busy_seconds for one in of.traffic)
                    free[place, done.kind] = ends
                    self.actions.append(Ran(place, begins, ends, done))
                    key = (
                        (FORWARD if done.kind == SEND_F else BACKWARD_INPUT),
                        done.stage,
                        done.microbatch,
                    )
                    arrived[key] = begins, ends
                    if key in waiting:
                        runnable.append(waiting.pop(key))
                    continue
                if need is not None:
                    begins, ends = arrived[need]
                    self._wait(place, done, clock[place], begins, ends)
                    clock[place] = max(clock[place], ends)
                start = clock[place]
                clock[place] += of.seconds
                self._note(place, done, start, clock[place])
                if done.kind in (FORWARD, *BACKWARDS):
                    key = (
                        (FORWARD if done.kind == FORWARD else BACKWARD_INPUT),
                        done.stage,
                        done.microbatch,
                    )
                    if self._is_local(done, place):
                        arrived[key] = clock[place], clock[place]
        if any(at[place] < len(actions) - 1 for place, actions in enumerate(lists)):
            raise TitanliteError("the composed pipeline deadlocks")
        # The gradient norm is a sum over all ranks.
        start = max(clock)
        ends = start
        for place, one in enumerate(self._compositions):
            seconds = self.time(one.actions[-1].segment, one.rank).seconds
            ends = max(ends, start + seconds)
            self.actions.append(Ran(place, start, start + seconds, one.actions[-1]))
        return ends

    def _is_local(self, done: Done, place: int) -> bool:
        """Whether the next stage of a pass is on the same rank."""
        to = done.stage + (1 if done.kind == FORWARD else -1)
        return self._place_of.get(to) == place

    def _need(self, done: Done, place: int) -> tuple[str, int, int] | None:
        """What an action waits for: the output of another stage's action, sent or local."""
        last = max(self._place_of, default=0)
        if done.kind == FORWARD and done.stage > 0:
            return FORWARD, done.stage - 1, done.microbatch
        if done.kind in BACKWARDS and done.stage < last:
            return BACKWARD_INPUT, done.stage + 1, done.microbatch
        return None

    def _wait(self, place: int, done: Done, now: float, begins: float, ends: float) -> None:
        if ends <= now:
            return
        phase = "forward" if done.kind == FORWARD else "backward"
        self._exposed[place, "receive", phase] += ends - max(now, begins)

    def _note(self, place: int, done: Done, start: float, end: float) -> None:
        self.actions.append(Ran(place, start, end, done))
        if end <= start or done.kind in (START, BATCH):
            return
        kind = SPAN_KINDS.get(done.kind, done.kind)
        microbatch = None if done.microbatch < 0 else done.microbatch
        self.spans.append(Span(place, start, end, kind, done.stage, microbatch))

    def rank_time(self, place: int, seconds: float) -> SegmentTime:
        """The sum of a rank's actions in a step of `seconds`."""
        one = self._compositions[place]
        total = SegmentTime(0.0, {}, (), 0.0, 0.0, 0.0)
        for segment, times in one.segments():
            total = _add(total, self.time(segment, one.rank), times)
        traffic = []
        for item in total.traffic:
            if item.axis == "pp":
                exposed = self._exposed[place, item.kind, item.phase]
                item = replace(item, exposed_seconds=exposed)
            traffic.append(item)
        spent = (
            sum(total.compute_seconds.values())
            + total.launch_seconds
            + sum(item.exposed_seconds for item in traffic)
        )
        return replace(
            total, seconds=seconds, traffic=tuple(traffic), idle_seconds=max(0.0, seconds - spent)
        )


def _output(done: Done) -> tuple[str, int, int]:
    """What an action computes or sends: the pass, the stage and the microbatch."""
    is_forward = done.kind in (FORWARD, SEND_F)
    return FORWARD if is_forward else BACKWARD_INPUT, done.stage, done.microbatch


def _add(total: SegmentTime, one: SegmentTime, times: int) -> SegmentTime:
    """`total` and `times` repetitions of `one`."""
    compute = dict(total.compute_seconds)
    for kind, seconds in one.compute_seconds.items():
        compute[kind] = compute.get(kind, 0.0) + seconds * times
    traffic: dict[tuple[str, str, str], Traffic] = {
        (item.axis, item.kind, item.phase): item for item in total.traffic
    }
    for item in one.traffic:
        key = item.axis, item.kind, item.phase
        known = traffic.get(key, Traffic(*key, 0, 0.0, 0.0, 0.0))
        traffic[key] = Traffic(
            *key,
            known.count + item.count * times,
            known.num_bytes + item.num_bytes * times,
            known.busy_seconds + item.busy_seconds * times,
            known.exposed_seconds + item.exposed_seconds * times,
        )
    return SegmentTime(
        total.seconds + one.seconds * times,
        compute,
        tuple(traffic.values()),
        total.launch_seconds + one.launch_seconds * times,
        0.0,
        total.flops + one.flops * times,
    )

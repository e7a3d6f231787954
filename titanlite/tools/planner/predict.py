"""The time of a composed step: what each action takes, and the pipeline's clock. Torch-free.

    Compositions + Cost -> predict -> Prediction

The events of an action run on the streams of one rank (timing.py), once for all actions that are
alike. The ranks of a pipeline then run their actions in the schedule's order, each as soon as its
rank is free and its input has arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from titanlite.config import ResolvedJob
from titanlite.errors import TitanliteError
from titanlite.schedule import Span, clock
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
from titanlite.schedule.generators import without_garbage_collection
from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.planner.compose import END, START, Composition, Done
from titanlite.tools.planner.composition import Pieces, Segment
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Communication
from titanlite.tools.planner.segments import BATCH, P2P, Shared
from titanlite.tools.planner.timing import SegmentTime, StepTime, add_up, step_time, time_events

BACKWARDS = (FULL_BACKWARD, BACKWARD_INPUT)
SENDS = (SEND_F, SEND_B)
Timing = tuple[float, int | None, int | None]
"""An action's seconds, the output that it waits for and the one that it gives (`_code`)."""
Output = tuple[int, int]
"""What a stage gives in a pass (`_code`), and for which microbatch."""
WAIT_FOR_SENDS = ("1F1B",)
"""Schedules whose ranks wait for what they have sent: PyTorch's Schedule1F1B posts a send together
with the receive of the other direction and waits for both, and a send of the same direction only
after the one before has ended."""
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


@without_garbage_collection()
def predict(
    resolved: ResolvedJob,
    compositions: Sequence[Composition],
    cost: Cost,
    pieces: Pieces,
    shared: Shared | None = None,
    *,
    keeps_actions: bool = True,
) -> Prediction:
    """The time of a step; `compositions` has one rank of every stage of the pipeline, in order.

    `shared` is what they were composed with. Unless `keeps_actions`, the timeline is empty.
    """
    pipeline, flops = resolved.pipeline, pieces.flops_per_token
    tokens = resolved.global_batch_size * resolved.seq_len
    return run_compositions(
        compositions,
        cost,
        shared or Shared(),
        keeps_actions=keeps_actions,
        waits_for_sends=pipeline is not None and pipeline.schedule.name in WAIT_FOR_SENDS,
        tokens=tokens,
        model_flops=flops and flops * tokens,
        dtype=resolved.config.training.param_dtype,
    )


def run_compositions(
    compositions: Sequence[Composition],
    cost: Cost,
    shared: Shared,
    *,
    keeps_actions: bool = True,
    waits_for_sends: bool,
    **of_step: Any,
) -> Prediction:
    """As `predict`; `of_step` are further arguments of `step_time`."""
    running = _PipelineRun(
        compositions, cost, shared, keeps_actions=keeps_actions, waits_for_sends=waits_for_sends
    )
    seconds = running.run()
    segments = {
        one.rank: running.rank_time(place, seconds) for place, one in enumerate(compositions)
    }
    step = step_time(segments, cost, **of_step)
    rows = [f"rank {one.rank}" for one in compositions]
    idle = [segment.idle_seconds / seconds if seconds else 0.0 for segment in segments.values()]
    timeline = Timeline("predicted step", rows, running.spans, unit="s")
    return Prediction(step, timeline, sum(idle) / len(idle), running.actions)


class _PipelineRun:
    """Runs the actions of all ranks of a pipeline in virtual time."""

    def __init__(
        self,
        compositions: Sequence[Composition],
        cost: Cost,
        shared: Shared,
        *,
        keeps_actions: bool,
        waits_for_sends: bool,
    ) -> None:
        self._compositions, self._cost = compositions, cost
        self._waits_for_sends = waits_for_sends
        self._known: dict[int, SegmentTime] = {}
        self._times, self._keeps_actions = shared.times, keeps_actions
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

    def time(self, done: Done, rank: int) -> SegmentTime:
        """The time of an action; equal for all ranks of a stage."""
        segment = done.segment
        if done.kind in P2P:
            return self._known.get(id(segment)) or self._time_message(segment, rank)
        found = self._times.get(id(segment))
        if found is None:
            if segment.fewer is None:
                found = time_events(segment.events, self._cost, rank)
            else:
                one, two, count = segment.fewer
                shorter, longer = (time_events(s.events, self._cost, rank) for s in (one, two))
                found = _add(_add(longer, longer, count), shorter, -count)
            self._times[id(segment)] = found
        return found

    def _time_message(self, segment: Segment, rank: int) -> SegmentTime:
        """The time of a message; equal for all that take as long and count as the same."""
        (event,) = segment.events
        assert isinstance(event, Communication)
        key = event.kind, event.place, self._cost.communication(event, rank)
        if key not in self._times:
            self._times[key] = time_events(segment.events, self._cost, rank)
        found = self._known[id(segment)] = self._times[key]
        return found

    def run(self) -> float:
        """The seconds of the step."""
        rows = [self._row(place) for place in range(len(self._compositions))]
        ran, free, blocked = clock.run([[timed for _, timed in row] for row in rows], self._wait)
        if blocked:
            raise TitanliteError("the composed pipeline deadlocks")
        if self._keeps_actions:
            for place, number, start, end in ran:
                self._note(place, start, end, rows[place][number][0])
        # The gradient norm is a sum over all ranks.
        start = ends = max(free)
        for place, one in enumerate(self._compositions):
            seconds = self.time(one.actions[-1], one.rank).seconds
            ends = max(ends, start + seconds)
            self.actions.append(Ran(place, start, start + seconds, one.actions[-1]))
        return ends

    def _row(self, place: int) -> list[tuple[Done, clock.TimedAction]]:
        """The actions of a rank that take time, without the update."""
        one = self._compositions[place]
        known: dict[tuple[int, str, int], Timing] = {}
        sent: dict[str, Output] = {}
        last_sent = ""
        row = []
        for done in one.actions:
            kind = done.kind
            if kind in (RECV_F, RECV_B, END):
                continue
            key = id(done.segment), kind, done.stage
            if key not in known:
                known[key] = self._timing(done, place, one.rank)
            seconds, need, gives = known[key]
            needs = [] if need is None else [(need, done.microbatch)]
            outputs = [] if gives is None else [(gives, done.microbatch)]
            channel = None
            if kind in SENDS:
                # A send runs beside the work; the next one on its link waits for it.
                channel = place, kind
                if self._waits_for_sends and kind in sent:
                    needs.append(sent[kind])
                sent[kind], last_sent = outputs[0], kind
            elif self._waits_for_sends and last_sent == (SEND_B if kind == FORWARD else SEND_F):
                needs.append(sent[last_sent])
            row.append((done, clock.TimedAction(seconds, needs, outputs, channel)))
        return row

    def _timing(self, done: Done, place: int, rank: int) -> Timing:
        of = self.time(done, rank)
        last = max(self._place_of, default=0)
        kind, stage = done.kind, done.stage
        if kind in SENDS:
            busy = sum(one.busy_seconds for one in of.traffic)
            return busy, None, _code(kind == SEND_F, stage)
        need = gives = None
        if kind == FORWARD:
            need = _code(True, stage - 1) if stage > 0 else None
            is_local = self._place_of.get(stage + 1) == place
            gives = _code(True, stage) if is_local else None
        elif kind in BACKWARDS:
            need = _code(False, stage + 1) if stage < last else None
            is_local = self._place_of.get(stage - 1) == place
            gives = _code(False, stage) if is_local else None
        return of.seconds, need, gives

    def _wait(self, place: int, output: Hashable, now: float, transfer: clock.Interval) -> None:
        """A rank waits for an output: for another rank's, or until its own has been sent."""
        code, _ = cast("Output", output)
        kind = "send" if transfer.rank == place else "receive"
        phase = "forward" if code % 2 else "backward"
        self._exposed[place, kind, phase] += transfer.end - max(now, transfer.start)

    def _note(self, place: int, start: float, end: float, done: Done) -> None:
        self.actions.append(Ran(place, start, end, done))
        if end <= start or done.kind in (*SENDS, START, BATCH):
            return
        kind = SPAN_KINDS.get(done.kind, done.kind)
        microbatch = None if done.microbatch < 0 else done.microbatch
        self.spans.append(Span(place, start, end, kind, done.stage, microbatch))

    def rank_time(self, place: int, seconds: float) -> SegmentTime:
        """The sum of a rank's actions in a step of `seconds`."""
        one = self._compositions[place]
        total = SegmentTime(0.0, {}, (), 0.0, 0.0, 0.0)
        for done, count in one.repeated():
            total = _add(total, self.time(done, one.rank), count)
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


def _code(is_forward: bool, stage: int) -> int:
    """A number for the output of a stage in a pass."""
    return 2 * stage + is_forward


def _add(total: SegmentTime, one: SegmentTime, times: int) -> SegmentTime:
    """`total` and `times` repetitions of `one`."""
    compute = dict(total.compute_seconds)
    for kind, seconds in one.compute_seconds.items():
        compute[kind] = compute.get(kind, 0.0) + seconds * times
    return SegmentTime(
        total.seconds + one.seconds * times,
        compute,
        add_up([*((item, 1) for item in total.traffic), *((item, times) for item in one.traffic)]),
        total.launch_seconds + one.launch_seconds * times,
        0.0,
        total.flops + one.flops * times,
    )

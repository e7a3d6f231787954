"""What each rank of a predicted step does when, on each of its streams. Torch-free.

    JobPlan -> step_spans -> spans for the page -> make_timeline -> a Chrome trace

A pipeline's main stream shows the actions of its schedule; without a pipeline it shows modules.
Communication is shown on a stream per mesh axis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.schedule import Span
from titanlite.schedule.actions import COMPUTE_KINDS, SEND_B, SEND_F
from titanlite.schedule.walk import WORK
from titanlite.tools.figures.schedule_svg import draw_svg
from titanlite.tools.figures.timeline import (
    EXCHANGE,
    GATHER,
    LANES,
    NAMES,
    RECEIVE,
    REDUCE,
    SEND_TO,
    Timeline,
)
from titanlite.tools.figures.trace import lane_name
from titanlite.tools.planner.compose import END, START
from titanlite.tools.planner.composition import Segment, named
from titanlite.tools.planner.cost import Cost
from titanlite.tools.planner.events import Event, Operator
from titanlite.tools.planner.planning import JobPlan
from titanlite.tools.planner.predict import Ran
from titanlite.tools.planner.timing import prepare, program
from titanlite.tools.simulate.quantity import format_seconds
from titanlite.tools.simulate.streams import MAIN, run_streams

MOST_SPANS = 20_000
"""Communication and modules inside of actions are shown up to this number of spans."""
OUTSIDE = {START: "start of the step", END: "end of the step"}
LANE_OF = {
    "send": SEND_TO,
    "receive": RECEIVE,
    "all_gather": GATHER,
    "reduce_scatter": REDUCE,
    "all_reduce": REDUCE,
}


class StepSpan(NamedTuple):
    """`name` runs on `stream` of `rank` from `start` to `end`, in seconds from the step's start.

    `stream` is MAIN or a mesh axis. `kind` is a schedule's action, the phase of a module, or the
    kind of a communication. Without a pipeline, `stage` and `microbatch` are None.
    """

    rank: int
    stream: str
    start: float
    end: float
    name: str
    kind: str
    stage: int | None = None
    microbatch: int | None = None


def step_spans(plan: JobPlan, ranks: Sequence[int] = ()) -> list[StepSpan]:
    """The spans of a predicted step: of `ranks` (default: of all stages), by rank and start."""
    prediction, cost, dims = plan.prediction, plan.cost, plan.dims
    if prediction is None or cost is None:
        return []
    rank_of = [dims.rank(pp=place) for place in range(dims.pp)]
    shown = set(ranks or rank_of)
    place_of = {
        ran.done.stage: ran.place for ran in prediction.actions if ran.done.kind in COMPUTE_KINDS
    }
    inside = _Inside(cost)
    found: list[StepSpan] = []
    for ran in sorted(prediction.actions, key=lambda ran: (ran.start, ran.place)):
        rank = rank_of[ran.place]
        if ran.done.kind in (SEND_F, SEND_B):
            other = place_of[ran.done.stage + (1 if ran.done.kind == SEND_F else -1)]
            found += (one for one in _message(ran, rank, rank_of[other]) if one.rank in shown)
        elif rank in shown:
            is_action = ran.done.stage >= 0 and dims.pp_enabled
            if is_action and ran.end > ran.start:
                found.append(_action(ran, rank))
            if len(found) < MOST_SPANS:
                found += (
                    one for one in inside.of(ran, rank) if not (is_action and one.stream == MAIN)
                )
    return sorted(found, key=lambda one: (one.rank, one.stream != MAIN, one.stream, one.start))


def make_timeline(spans: Sequence[StepSpan], dims: ParallelDims) -> Timeline:
    """The spans in the form of a measured pipeline step: a row for each rank, in milliseconds.

    Its communication is in the same lanes. Work outside of a schedule has its name as its kind.
    """
    ranks = sorted({one.rank for one in spans})
    row = {rank: number for number, rank in enumerate(ranks)}
    return Timeline(
        "predicted step",
        [f"rank {rank} ({dims.describe_place(rank)})" for rank in ranks],
        [
            Span(
                row[one.rank], 1e3 * one.start, 1e3 * one.end, _kind(one), one.stage, one.microbatch
            )
            for one in spans
        ],
        unit="ms",
    )


def draw_schedules(predicted: Timeline, measured: Timeline | None = None, step: str = "") -> str:
    """An SVG of the predicted pipeline, with the measured one below it on the same scale.

    `step` says what the whole step takes; drawn is its schedule alone.
    """
    pictured = [_schedule_only(predicted)]
    if step:
        pictured[0] = replace(pictured[0], caption=f"{step}; its schedule: {pictured[0].caption}")
    if measured is not None:
        pictured.append(_schedule_only(replace(measured, title=f"measured: {measured.title}")))
    return draw_svg(*pictured)


def _schedule_only(timeline: Timeline) -> Timeline:
    """The work of a schedule and the communication during it, from 0 on, with its bubble."""
    work = [span for span in timeline.spans if span.kind in WORK]
    first = min((span.start for span in work), default=0.0)
    last = max((span.end for span in work), default=0.0)
    spans = [
        span._replace(start=span.start - first, end=span.end - first)
        for span in timeline.spans
        if (span.kind in WORK or span.kind in LANES) and first <= span.start and span.end <= last
    ]
    alone = replace(timeline, spans=spans, curves={})
    bubbles = ", ".join(f"{part:.0%}" for part in alone.bubbles())
    step = format_seconds((last - first) / 1e3)
    return replace(alone, caption=f"{step}; bubble, by rank: {bubbles}")


def _kind(span: StepSpan) -> str:
    if span.stream != MAIN:
        return LANE_OF.get(span.kind, EXCHANGE)
    return span.name if span.stage is None else span.kind


def _action(ran: Ran, rank: int) -> StepSpan:
    done = ran.done
    name = f"{NAMES.get(done.kind, done.kind.lower())}, stage {done.stage}"
    microbatch = None if done.microbatch < 0 else done.microbatch
    if microbatch is not None:
        name += f", microbatch {microbatch}"
    return StepSpan(rank, MAIN, ran.start, ran.end, name, done.kind, done.stage, microbatch)


def _message(ran: Ran, rank: int, to: int) -> Iterator[StepSpan]:
    """Both sides of a message."""
    what = "activation" if ran.done.kind == SEND_F else "gradient"
    what = f"{what} of microbatch {ran.done.microbatch}"
    yield StepSpan(rank, "pp", ran.start, ran.end, f"send {what} to rank {to}", "send")
    yield StepSpan(to, "pp", ran.start, ran.end, f"receive {what} from rank {rank}", "receive")


class _Inside:
    """The modules and the communication of actions; those that are alike are timed once."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._known: dict[int, list[tuple[str, float, float, str, str]]] = {}

    def of(self, ran: Ran, rank: int) -> Iterator[StepSpan]:
        segment = ran.done.segment
        if id(segment) not in self._known:
            self._known[id(segment)] = list(self._run(segment, rank))
        for stream, start, end, name, kind in self._known[id(segment)]:
            if stream == MAIN and kind != "optimizer":
                name = OUTSIDE.get(ran.done.kind, name)
            yield StepSpan(rank, stream, ran.start + start, ran.start + end, name, kind)

    def _run(self, segment: Segment, rank: int) -> Iterator[tuple[str, float, float, str, str]]:
        events = prepare(_in_own_blocks(segment), self._cost)
        label = lambda operator: f"{operator.place.phase}|{operator.place.module}"
        items = program(events, self._cost, rank, label=label)
        for span in run_streams(items, keep_spans=True).spans:
            first, _, second = span.label.partition("|")
            if span.stream == MAIN:
                name = f"{first} of {second}" if second else first
                yield MAIN, span.start, span.end, name, first
            else:
                yield span.stream.split(" ")[0], span.start, span.end, f"{first}, {second}", first


def _in_own_blocks(segment: Segment) -> list[Event]:
    """The events of a segment, with the names of their own blocks."""
    events = list(segment.events)
    for start, end, name in segment.parts:
        for at in range(start, end):
            event = events[at]
            if isinstance(event, Operator):
                events[at] = replace(event, place=named(event.place, name))
    return events


def read_trace(text: str) -> Timeline:
    """The timeline of a trace that make_trace has written, in milliseconds, without its curves.

    Raises ValueError if `text` is no such trace.
    """
    try:
        events = json.loads(text)["traceEvents"]
        names = {e["name"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        lane_of = {lane_name(kind): kind for kind in LANES}
        kind_of = {name: kind for kind, name in NAMES.items() if kind not in LANES}
        spans: list[Span] = []
        begun: dict[int, float] = {}
        for event in events:
            if event["ph"] == "b":
                begun[event["id"]] = event["ts"] / 1e3
            elif event["ph"] == "e":
                start = begun.pop(event["id"])
                spans.append(Span(event["tid"], start, event["ts"] / 1e3, lane_of[event["cat"]]))
            elif event["ph"] == "X":
                start, args = event["ts"] / 1e3, event["args"]
                kind = kind_of.get(event["cat"], event["cat"])
                end = start + event["dur"] / 1e3
                spans.append(
                    Span(event["tid"], start, end, kind, args["stage"], args["microbatch"])
                )
        rows = [threads[row] for row in range(len(threads))]
        return Timeline(names["process_name"], rows, spans, unit="ms")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no trace of a timeline: {error!r}") from error

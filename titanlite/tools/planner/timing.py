"""From the events of a step to its time; torch-free.

Operators become work on a rank's main stream, communications transfers on a stream per axis, and
tools/simulate/streams.py runs them. The functions take plain lists of events: a whole step, or
a part of one, such as the forward pass of a stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titanlite.mesh.parallel_dims import EXPERT_SHARDS, TABLE, Axis, flattened
from titanlite.tools.planner.cost import ATTENTION, ON_HOST, PRODUCT, Cost
from titanlite.tools.planner.events import (
    FROM_RANK_TO_RANK,
    HOST_LINK,
    TO_DEVICE,
    TO_HOST,
    Allocation,
    Communication,
    Event,
    Operator,
    Wait,
)
from titanlite.tools.planner.fuse import fuse
from titanlite.tools.simulate import streams

HOST = "host"
"""Compute seconds of a CPU that no operator explains: the step's own Python."""


@dataclass(frozen=True)
class AxisTraffic:
    """The communications of one axis, kind and phase on one rank.

    `num_bytes` are those of whole tensors. The rank's main stream waits for `exposed_seconds` of
    the `busy_seconds`; the rest is hidden behind its work.
    """

    axis: str
    kind: str
    phase: str
    count: int
    num_bytes: float
    busy_seconds: float
    exposed_seconds: float

    @property
    def hidden_seconds(self) -> float:
        return max(0.0, self.busy_seconds - self.exposed_seconds)


@dataclass(frozen=True)
class AxisTime:
    """All traffic of an axis."""

    num_bytes: float
    busy_seconds: float
    exposed_seconds: float
    hidden_seconds: float


@dataclass(frozen=True)
class SegmentTime:
    """The time of a list of events on one rank, and what it goes to.

    `compute_seconds` has the main stream's work by kind: products, attention, memory-bound,
    optimizer. `seconds` is the sum of all of them, of the exposed seconds of `traffic`, of
    `launch_seconds`, in which a GPU waits for its host, and of `idle_seconds`, in which the rank
    waits for another rank. `flops` are all operations, with recomputation.
    """

    seconds: float
    compute_seconds: dict[str, float]
    traffic: tuple[AxisTraffic, ...]
    launch_seconds: float
    idle_seconds: float
    flops: float

    @property
    def exposed_seconds(self) -> float:
        return sum(one.exposed_seconds for one in self.traffic)

    @property
    def axes(self) -> dict[str, AxisTime]:
        return {
            axis: AxisTime(
                *(
                    sum(getattr(one, name) for one in self.traffic if one.axis == axis)
                    for name in AxisTime.__dataclass_fields__
                )
            )
            for axis in dict.fromkeys(one.axis for one in self.traffic)
        }

    @property
    def busy_seconds(self) -> float:
        """Computing and communicating, whether at the same time or not: on a CPU, CPU-seconds."""
        return sum(self.compute_seconds.values()) + sum(one.busy_seconds for one in self.traffic)


@dataclass(frozen=True)
class StepTime:
    """The time of a step of a job.

    `ranks` are those that were timed, each of which stands for all ranks of its pipeline stage.
    `mfu` counts the model's operations (PaLM, appendix B, arXiv 2204.02311) and `hfu` those that
    the ranks execute, with recomputation, relative to the peak of the parameters' compute dtype.
    `bound` says in one sentence what the step's time goes to.
    """

    seconds: float
    tokens_per_second: float
    """Of one rank."""
    mfu: float | None
    hfu: float
    bound: str
    ranks: dict[int, SegmentTime] = field(default_factory=dict)


def time_events(events: Iterable[Event], cost: Cost, rank: int = 0) -> SegmentTime:
    """The time of one rank's events. Its peers are always ready."""
    events = prepare(events, cost)
    times = streams.run_streams(program(events, cost, rank))
    flops = sum(event.flops for event in events if isinstance(event, Operator))
    return SegmentTime(
        times.seconds,
        {kind: seconds for kind, seconds in times.compute.items() if seconds},
        add_up((one, 1) for one in _traffic_of(times)),
        times.launch_seconds,
        times.idle_seconds,
        flops,
    )


def _traffic_of(times: streams.StreamTimes) -> Iterator[AxisTraffic]:
    for (stream, label), of in times.traffic.items():
        kind, phase = label.split("|")
        axis = stream.split(" ")[0]
        yield AxisTraffic(
            axis, kind, phase, of.count, of.num_bytes, of.busy_seconds, of.exposed_seconds
        )


def add_up(parts: Iterable[tuple[AxisTraffic, int]]) -> tuple[AxisTraffic, ...]:
    """The traffic of all parts, by axis, kind and phase; each part runs a number of times."""
    found: dict[tuple[str, str, str], AxisTraffic] = {}
    for one, times in parts:
        key = one.axis, one.kind, one.phase
        known = found.get(key, AxisTraffic(*key, 0, 0.0, 0.0, 0.0))
        found[key] = AxisTraffic(
            *key,
            known.count + one.count * times,
            known.num_bytes + one.num_bytes * times,
            known.busy_seconds + one.busy_seconds * times,
            known.exposed_seconds + one.exposed_seconds * times,
        )
    return tuple(found.values())


def step_time(
    segments: Mapping[int, SegmentTime],
    cost: Cost,
    *,
    tokens: float,
    model_flops: float | None,
    dtype: str = "bfloat16",
) -> StepTime:
    """The step of a job whose ranks have these times.

    `tokens` are those of the global batch, and `model_flops` the model's operations for all of
    them, None if they are not known.
    """
    seconds = max(segment.seconds for segment in segments.values())
    num_ranks = cost.dims.world_size
    peak = cost.hardware.peak(dtype)
    executed = sum(segment.flops for segment in segments.values()) / len(segments)
    return StepTime(
        seconds=seconds,
        tokens_per_second=tokens / seconds / num_ranks,
        mfu=None if model_flops is None else model_flops / (seconds * num_ranks * peak),
        hfu=executed / (seconds * peak),
        bound=describe_bound(segments),
        ranks=dict(segments),
    )


def prepare(events: Iterable[Event], cost: Cost) -> list[Event]:
    """The events as the device would start them: fused if compiled; on a GPU, some ahead."""
    found: list[Event] = []
    if cost.hardware.kind == "cpu":
        found = [event for event in events if not isinstance(event, Allocation)]
    else:
        found = started_ahead(events)
    return fuse(found) if cost.is_compiled else found


def started_ahead(events: Iterable[Event]) -> list[Event]:
    """The events without memory, each communication where the main stream lets it start.

    That is `ready` events after the start: the host runs ahead of a GPU, so FSDP2's all-gathers of
    the forward pass, on a stream of their own, start before the program comes there. The copies
    that fill their buffers, beside the main stream too, move with them.
    """
    kept: list[tuple[int, Event]] = []
    ahead: dict[int, list[Event]] = defaultdict(list)
    for at, event in enumerate(events):
        if isinstance(event, Allocation):
            continue
        if not (isinstance(event, Communication) and 0 <= event.ready < at):
            kept.append((at, event))
            continue
        copies: list[Event] = []
        while kept and _is_beside(kept[-1][1]) and kept[-1][0] >= event.ready:
            copies.insert(0, kept.pop()[1])
        ahead[event.ready] += [*copies, event]
    found: list[Event] = []
    positions = sorted(ahead)
    for at, event in kept:
        while positions and positions[0] <= at:
            found += ahead[positions.pop(0)]
        found.append(event)
    return found + [event for position in positions for event in ahead[position]]


def _is_beside(event: Event) -> bool:
    return isinstance(event, Operator) and event.is_beside


def program(
    events: Sequence[Event],
    cost: Cost,
    rank: int = 0,
    *,
    label: Callable[[Operator], str] = Cost.kind,
) -> list[streams.Item]:
    """The events of `rank` as items of its streams; `label` is what an operator counts as."""
    is_waited, waited = [False] * len(events), set()
    for at in range(len(events) - 1, -1, -1):
        event = events[at]
        if isinstance(event, Wait):
            waited.add(event.number)
        elif isinstance(event, Communication):
            is_waited[at] = event.number in waited
            waited.discard(event.number)
            # What another communication comes after need not hold up the main stream.
            waited.update(event.after)
    is_cpu = cost.hardware.kind == "cpu"
    items: list[streams.Item] = []
    # A segment can be repeated, so a number can come back: each transfer has a number of its own.
    number_of: dict[int, int] = {}
    for at, event in enumerate(events):
        if isinstance(event, Operator):
            seconds, _, launch = cost.price(event)
            if seconds or launch:
                items.append(streams.Compute(seconds, label(event), launch))
        elif isinstance(event, Communication):
            host = cost.host(event)
            items.append(
                streams.Compute(host, HOST) if is_cpu else streams.Compute(0.0, HOST, host)
            )
            number_of[event.number] = at
            after = tuple(number_of[one] for one in event.after if one in number_of)
            items.append(_transfer(event, at, cost, rank, after))
            if not is_waited[at]:
                items.append(streams.WaitFor(at))
        elif isinstance(event, Wait) and event.number in number_of:
            items.append(streams.WaitFor(number_of[event.number]))
    return items


def _transfer(
    one: Communication, number: int, cost: Cost, rank: int, after: tuple[int, ...]
) -> streams.StreamTransfer:
    load = cost.communication(one, rank)
    links: tuple[str, ...] = (f"{load.link} out", f"{load.link} in")
    stream = one.axis
    if one.kind in FROM_RANK_TO_RANK:
        links = links[:1] if one.kind == "send" else links[1:]
        stream = f"{one.axis} {one.kind} {one.peer}"
    elif one.axis == HOST_LINK:
        links = links[1:] if one.kind == TO_DEVICE else links[:1]
        stream = f"{one.axis} {one.kind}"
    return streams.StreamTransfer(
        number,
        stream,
        load.latency_seconds,
        load.transfer_seconds,
        one.num_bytes,
        f"{one.kind}|{one.place.phase}",
        links,
        after,
    )


KIND_NAMES = {
    "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters",
    "all_reduce": "all-reduces",
    "all_to_all": "all-to-alls",
    "broadcast": "broadcasts",
    "send": "sends",
    "receive": "receives",
    TO_DEVICE: "copies to the device",
    TO_HOST: "copies to the host",
}
PHASE_NAMES = {
    "forward": "the forward pass",
    "backward": "the backward pass",
    "recomputation": "the recomputation",
    "optimizer": "the optimizer step",
    "other": "the step",
}


def mesh_dims() -> dict[str, Axis]:
    """Every mesh dimension that communicates by itself, and the axis that it is shown as.

    The innermost is the first. Flattened axes are shown as the first of them; efsdp is left out.
    """
    rows = {axis.name: axis for axis in reversed(TABLE)}
    return rows | {name: rows[axes[0]] for name, axes in flattened().items()}


AXIS_NAMES = {
    **{dim: axis.label for dim, axis in mesh_dims().items()},
    EXPERT_SHARDS: "the experts' FSDP",
    "world": "world",
    HOST_LINK: "host link",
}
LEAST_SHARE = 0.02
MOST_REASONS = 4


def describe_bound(segments: Mapping[int, SegmentTime]) -> str:
    """What the busiest rank's time goes to, largest first, in one sentence."""
    rank, segment = min(segments.items(), key=lambda one: one[1].idle_seconds)
    if not segment.seconds:
        return "the step does nothing"
    shares: list[tuple[float, str]] = []
    for one in segment.traffic:
        name = AXIS_NAMES.get(one.axis, one.axis)
        if one.axis == HOST_LINK:
            name = "CPU offload's"
        what = f"{name} {KIND_NAMES.get(one.kind, one.kind)} of {PHASE_NAMES[one.phase]}"
        shares.append((one.exposed_seconds, f"{what} are exposed for {{}}"))
    for kind, seconds in segment.compute_seconds.items():
        verb = "take" if kind in (PRODUCT,) else "takes"
        name = {
            PRODUCT: "matrix products",
            ATTENTION: "attention",
            HOST: "the host's work for communication",
            ON_HOST: "the optimizer on the host",
        }.get(kind, f"{kind} work" if kind == "memory-bound" else f"the {kind}")
        shares.append((seconds, f"{name} {verb} {{}}"))
    shares.append((segment.launch_seconds, "the GPU waits for its host for {}"))
    whose = "every rank" if len(segments) == 1 else f"rank {rank}, the busiest,"
    shares.append((segment.idle_seconds, f"{whose} is idle for {{}}"))
    shares = [
        one for one in sorted(shares, reverse=True) if one[0] >= LEAST_SHARE * segment.seconds
    ]
    parts = [
        text.format(f"{seconds / segment.seconds:.0%}" + (" of the step" if not at else ""))
        for at, (seconds, text) in enumerate(shares[:MOST_REASONS])
    ]
    return "; ".join(parts)

"""The plan of a job as text for a terminal, and as plain values for programs. Torch-free."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from titanlite.mesh.parallel_dims import EXPERT_SHARDS
from titanlite.quantities import format_bytes, format_count
from titanlite.tools.figures.schedule_text import draw_text
from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.planner.cost import ATTENTION, MEMORY_BOUND, ON_HOST, OPTIMIZER, PRODUCT
from titanlite.tools.planner.events import CATEGORIES, HOST_LINK, Peak
from titanlite.tools.planner.planning import JobPlan, RankPlan
from titanlite.tools.planner.timing import (
    AXIS_NAMES,
    HOST,
    PHASE_NAMES,
    SegmentTime,
    StepTime,
    mesh_dims,
)
from titanlite.tools.simulate.quantity import format_seconds
from titanlite.tools.tables import beside

T = TypeVar("T")

LEAST_WIDTH, MOST_WIDTH = 60, 140
# A device's memory of which less is used is not drawn: the bars would be empty.
LEAST_SHOWN_SHARE = 0.05
LEAST_SHOWN_IDLE = 0.0005
# Sums of times have rounding errors.
LEAST_SECONDS = 1e-9
MOST_ROWS = 32
"""Rows of a timeline; of a longer pipeline, the ranks of the plan are drawn."""

# Okabe and Ito's colours.
BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, YELLOW, GREY = (
    *("#0072b2", "#d55e00", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#f0e442", "#999999"),
)


@dataclass(frozen=True)
class Share:
    """A part of a bar: its name, its letter without colour, and its colour."""

    name: str
    letter: str
    color: str


MEMORY_SHARES = tuple(
    Share(name, letter, color)
    for name, letter, color in zip(
        CATEGORIES, "PGOAFCt", (BLUE, VERMILION, GREEN, ORANGE, SKY, PURPLE, GREY), strict=True
    )
)
IDLE = Share("idle", ".", "#dddddd")
LAUNCH = Share("waiting for the host", "L", YELLOW)
COMPUTE_SHARES = {
    PRODUCT: Share("matrix products", "M", BLUE),
    ATTENTION: Share("attention", "A", SKY),
    MEMORY_BOUND: Share("memory-bound", "m", GREEN),
    OPTIMIZER: Share("optimizer", "O", "#66c2a5"),
    ON_HOST: Share(ON_HOST, "U", "#1b7837"),
    HOST: Share("host", "H", YELLOW),
}
AXIS_SHARES = {
    dim: Share(f"{dim}, exposed", letter, color)
    for dim, letter, color in (
        *((dim, axis.letter, axis.color) for dim, axis in mesh_dims().items()),
        (EXPERT_SHARDS, "F", "#fdb863"),
        ("world", "w", GREY),
        (HOST_LINK, "K", "#c51b7d"),
    )
}


def show(plan: JobPlan, *, screen: str = "", width: int = 100, color: bool = False) -> str:
    """All that is known of a plan, in lines of at most `width` columns (60 to 140).

    `screen` describes the job; it stands below the figures that count.
    """
    width = min(MOST_WIDTH, max(LEAST_WIDTH, width))
    sections = [
        show_top(plan, width),
        screen.splitlines(),
        show_head(plan, width),
        show_memory(plan, width, color),
        show_time(plan, width, color),
        show_timeline(plan, width, color),
        show_communication(plan, width),
        show_notes(plan, width),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def show_top(plan: JobPlan, width: int) -> list[str]:
    """The warnings, and the figures that count: memory, time, throughput and utilization."""
    lines = _wrapped((("warning: ", one) for one in plan.warnings), width, 2)
    lines += [""] * bool(lines)
    used, tensors = format_bytes(plan.device_bytes), format_bytes(plan.peak_bytes)
    largest = max(plan.ranks, key=lambda one: (one.reserved, one.peak.num_bytes))
    where = f"at the peak of {_name(largest)}"
    if plan.device_bytes > plan.peak_bytes:
        where = f"on {_name(largest)}, whose tensors take {tensors} at the peak"
    if plan.hardware is None:
        rows = [("memory", f"{used} {where}"), ("time", "`titanlite plan --hardware NAME`")]
    else:
        whole = plan.hardware.memory.num_bytes
        fits = "it fits" if plan.device_bytes <= whole else "IT DOES NOT FIT"
        share = _percent(plan.device_bytes / whole)
        if plan.bytes_range is not None:
            least, most = map(format_bytes, plan.bytes_range)
            used += f" ({least} to {most})"
            fits = "IT MAY NOT FIT" if plan.device_bytes <= whole < plan.bytes_range[1] else fits
        rows = [("memory", f"{used} of {format_bytes(whole)} ({share}) {where}: {fits}")]
    if plan.prediction is not None:
        step, idle = plan.prediction.step, plan.prediction.bubble
        unit = "samples" if plan.sample_tokens else "tokens"
        rate = format_count(step.tokens_per_second / (plan.sample_tokens or 1))
        shares = [] if step.mfu is None else [("MFU", f"{step.mfu:.1%}")]
        shares += [("idle", f"{idle:.1%}")] if idle >= LEAST_SHOWN_IDLE or step.mfu is None else []
        hfu = f"{step.hfu:.1%} (all operations, also recomputed)"
        (name, text), *more = [*shares, ("hardware utilization", hfu)]
        seconds = format_seconds(step.seconds)
        if plan.seconds_range is not None:
            seconds += " ({} to {})".format(*map(format_seconds, plan.seconds_range))
        rows += [("step", seconds), ("speed", f"{rate} {unit}/s/rank")]
        rows.append((name, ", ".join([text, *(" ".join(pair) for pair in more)])))
    rows += [("next" if at == 0 else "", one.text) for at, one in enumerate(plan.advice)]
    return lines + _wrapped(((f"{name:10}", text) for name, text in rows), width, 10)


def step_in_words(plan: JobPlan) -> str:
    """The length of a step, and the mean share of it in which a rank is idle."""
    if plan.prediction is None:
        return ""
    seconds = format_seconds(plan.prediction.step.seconds)
    return f"step {seconds}, idle {plan.prediction.bubble:.1%}"


def show_head(plan: JobPlan, width: int) -> list[str]:
    """The ranks, their hardware, and what bounds the step."""
    lines = [f"{plan.dims.world_size:,} ranks: {plan.dims.describe()}"]
    if plan.hardware is None:
        return lines
    rows = [("hardware", plan.hardware.name)]
    if plan.host_bytes and (host := plan.hardware.offload_host) is not None:
        used = f"{format_bytes(plan.host_bytes)} of a rank's {format_bytes(host.num_bytes)}"
        share = _percent(plan.host_bytes / host.num_bytes)
        rows.append(("host", f"{used} of the host's memory at the peak ({share})"))
    if plan.prediction is not None:
        rows.append(("bound", plan.prediction.step.bound))
    return lines + _wrapped(((f"  {name:10}", text) for name, text in rows), width, 12)


def show_memory(plan: JobPlan, width: int = 100, color: bool = False) -> list[str]:
    """A bar for each rank: the bytes of each category at the peak of a step.

    With CPU offload on a GPU, the same for what each rank takes of its host's memory.
    """
    hardware = plan.hardware
    device = 0.0 if hardware is None else hardware.memory.num_bytes
    peaks = [one.peak for one in plan.ranks]
    title = "memory of a rank at the peak of a step"
    lines = _show_peaks(plan, peaks, (title, "the device's", device), width, color)
    of_place: dict[str, list[str]] = {}
    for one in plan.ranks:
        of_place.setdefault(_place(one), []).append(f"{one.rank}")
    places = [
        f"the peak of {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)} is in {place}"
        for place, ranks in of_place.items()
    ]
    wrapped = textwrap.wrap("; ".join(places), width - 2)
    lines += [f"  {line}" for line in wrapped]
    on_host = [one.host for one in plan.ranks if one.host is not None]
    if not on_host:
        return lines
    host = None if hardware is None else hardware.offload_host
    limit = 0.0 if host is None else host.num_bytes
    title = "the host's memory of a rank at its peak, for CPU offload"
    return [*lines, "", *_show_peaks(plan, on_host, (title, "its share", limit), width, color)]


def _show_peaks(
    plan: JobPlan, peaks: Sequence[Peak], what: tuple[str, str, float], width: int, color: bool
) -> list[str]:
    """Bars and a table of the ranks' peaks; `what` is the title, and the limit with its name."""
    title, limit_name, whole = what
    largest = max(peak.num_bytes for peak in peaks)
    if largest > LEAST_SHOWN_SHARE * whole and whole:
        title += f"; | is {limit_name} {format_bytes(whole)}"
    else:
        whole = 0.0
    names = [_name(one) for one in plan.ranks]
    margin = max(map(len, names))
    room = width - margin - 15
    lines = [title]
    for peak, name in zip(peaks, names, strict=True):
        values = {share: peak.bytes_of.get(share.name, 0) for share in MEMORY_SHARES}
        bar = draw_bar(values, max(largest, whole), room, color=color, mark=whole)
        total = format_bytes(peak.num_bytes)
        lines.append(f"  {name:{margin}} {total:>9}  {bar}".rstrip())
    rows = []
    for share in MEMORY_SHARES:
        cells = [peak.bytes_of.get(share.name, 0) for peak in peaks]
        if any(cells):
            key = _paint(share, share.letter, color)
            rows.append((key, share.name, [format_bytes(cell) for cell in cells]))
    return [*lines, "", *_table(names, rows, width)]


def show_time(plan: JobPlan, width: int = 100, color: bool = False) -> list[str]:
    """A bar and a column for each rank: the seconds of a step by what they go to."""
    if plan.prediction is None:
        return []
    step = plan.prediction.step
    ranks = [one.rank for one in plan.ranks]
    names = [_name(one) for one in plan.ranks]
    of_ranks = [time_shares(step.ranks[rank]) for rank in ranks]
    margin = max(map(len, names))
    lines = ["time of a rank in a step"]
    for name, values in zip(names, of_ranks, strict=True):
        bar = draw_bar(values, step.seconds, width - margin - 4, color=color)
        lines.append(f"  {name:{margin}}  {bar}")
    rows = []
    for share in dict.fromkeys(share for values in of_ranks for share in values):
        cells = []
        for values in of_ranks:
            seconds = values.get(share, 0.0)
            part = f"{seconds / step.seconds:.0%}" if step.seconds else ""
            is_shown = seconds > LEAST_SECONDS
            cells.append(f"{format_seconds(seconds)} {part:>4}" if is_shown else "-")
        if any(cell != "-" for cell in cells):
            rows.append((_paint(share, share.letter, color), share.name, cells))
    lines += ["", *_table(names, rows, width), ""]
    busiest = min(step.ranks, key=lambda rank: step.ranks[rank].idle_seconds)
    return [*lines, *_show_axes(step, busiest, width)]


def _show_axes(step: StepTime, rank: int, width: int) -> list[str]:
    """The traffic of a rank by axis; hidden seconds are those behind its work."""
    axes = _in_order(step.ranks[rank].axes)
    columns: list[tuple[str, Callable[[str], str]]] = [
        ("bytes", lambda axis: format_bytes(axes[axis].num_bytes)),
        ("seconds", lambda axis: format_seconds(axes[axis].busy_seconds)),
        ("exposed", lambda axis: format_seconds(axes[axis].exposed_seconds)),
        ("hidden", lambda axis: format_seconds(axes[axis].hidden_seconds)),
        ("exposed/step", lambda axis: f"{axes[axis].exposed_seconds / step.seconds:.1%}"),
    ]
    rows = [("", _axis_name(axis), [f(axis) for _, f in columns]) for axis in axes]
    whose = "a rank" if len(step.ranks) == 1 else f"rank {rank}, the busiest"
    return [
        f"communication of {whose}, by axis",
        *_table([name for name, _ in columns], rows, width),
    ]


def time_shares(segment: SegmentTime) -> dict[Share, float]:
    """What the seconds of a rank go to: compute by kind, exposed axes, launches, idle time."""
    values = {
        COMPUTE_SHARES.get(kind, Share(kind, "x", GREY)): seconds
        for kind, seconds in segment.compute_seconds.items()
    }
    values = {share: values[share] for share in COMPUTE_SHARES.values() if share in values} | values
    for axis, one in _in_order(segment.axes).items():
        share = AXIS_SHARES.get(axis, Share(f"{axis}, exposed", "X", GREY))
        values[share] = one.exposed_seconds
    return values | {LAUNCH: segment.launch_seconds, IDLE: segment.idle_seconds}


def show_timeline(plan: JobPlan, width: int = 100, color: bool = False) -> list[str]:
    """The step of a pipeline: what each rank does when."""
    if plan.prediction is None or not plan.dims.pp_enabled:
        return []
    timeline = in_milliseconds(plan.prediction.timeline)
    if len(timeline.rows) > MOST_ROWS:
        shown = [one.coordinates["pp"] for one in plan.ranks]
        timeline = replace(
            timeline,
            rows=[timeline.rows[place] for place in shown],
            spans=[
                span._replace(row=shown.index(span.row))
                for span in timeline.spans
                if span.row in shown
            ],
        )
    return draw_text(timeline, width, color).splitlines()


def in_milliseconds(timeline: Timeline) -> Timeline:
    """A timeline in seconds that is shorter than one, in milliseconds; others as they are."""
    if timeline.drawn_end >= 1:
        return timeline
    spans = [span._replace(start=1e3 * span.start, end=1e3 * span.end) for span in timeline.spans]
    return replace(timeline, spans=spans, unit="ms")


def show_communication(plan: JobPlan, width: int = 100) -> list[str]:
    """Number and bytes of each kind of communication, by axis, for each rank."""
    kinds_of: dict[str, set[str]] = {}
    for kind, axis in (key for one in plan.ranks for key in one.totals):
        kinds_of.setdefault(axis, set()).add(kind)
    rows: list[tuple[str, str, list[str]]] = []
    for axis, kinds in _in_order(kinds_of).items():
        rows.append(("", _axis_name(axis), [""] * len(plan.ranks)))
        for kind in sorted(kinds):
            counts = [one.totals.get((kind, axis), (0, 0)) for one in plan.ranks]
            cells = [f"{format_bytes(size)} in {n:,}" if n else "-" for n, size in counts]
            rows.append(("", f"  {kind}", cells))
    flops = [format_count(one.flops, spaced=True) + "FLOP" for one in plan.ranks]
    rows.append(("", "products", flops))
    title = "communication of a rank in a step: bytes of whole tensors, and in how many calls"
    return [*textwrap.wrap(title, width), *_table([*map(_name, plan.ranks)], rows, width)]


def show_notes(plan: JobPlan, width: int = 100) -> list[str]:
    """What the planning assumes, one paragraph each."""
    return _wrapped((("note: ", note) for note in plan.notes), width, 2)


def _wrapped(rows: Iterable[tuple[str, str]], width: int, indent: int) -> list[str]:
    """Rows of (beginning, text), whose further lines are indented."""
    of_rows = (textwrap.wrap(a + b, width, subsequent_indent=" " * indent) for a, b in rows)
    return [line for lines in of_rows for line in lines]


def draw_bar(
    values: Mapping[Share, float],
    whole: float,
    width: int,
    *,
    color: bool = False,
    mark: float = 0.0,
) -> str:
    """A bar of `width` characters for `whole`, and a | at `mark`, if that is not 0.

    Every share is rounded so that the bar's end is right.
    """
    room = width - (1 if mark else 0)
    scale = room / whole if whole else 0.0
    cells: list[Share | None] = []
    for share, end in zip(values, accumulate(values.values()), strict=True):
        cells += [share] * (min(room, round(end * scale)) - len(cells))
    cells += [None] * (room - len(cells))
    at = round(mark * scale) if mark else len(cells)
    first, second = (
        "".join(" " if share is None else _paint(share, share.letter, color) for share in part)
        for part in (cells[:at], cells[at:])
    )
    return f"{first}|{second}" if mark else first


def figures(plan: JobPlan) -> dict[str, Any]:
    """All figures of a plan as values that JSON can hold."""
    hardware, prediction = plan.hardware, plan.prediction
    return {
        "num_ranks": plan.dims.world_size,
        "degrees": plan.dims.degrees,
        "method": plan.method,
        "ranks": [_rank_figures(one) for one in plan.ranks],
        "peak_bytes": plan.peak_bytes,
        "reserved_bytes": plan.reserved_bytes,
        "device_bytes": plan.device_bytes,
        "device_bytes_range": plan.bytes_range,
        "host_bytes": plan.host_bytes,
        "hardware": None
        if hardware is None
        else {
            "name": hardware.name,
            "kind": hardware.kind,
            "memory_bytes": hardware.memory.num_bytes,
            "host_memory_bytes": None if hardware.host is None else hardware.host.num_bytes,
            "ranks_per_node": hardware.node.num_ranks,
        },
        "time": None
        if prediction is None
        else {
            **asdict(prediction.step),
            "bubble": prediction.bubble,
            "seconds_range": plan.seconds_range,
        },
        "next": [asdict(one) for one in plan.advice],
        "warnings": list(plan.warnings),
        "notes": list(plan.notes),
    }


def _rank_figures(one: RankPlan) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "coordinates": one.coordinates,
        "held_bytes": one.held,
        "peak": _peak_figures(one.peak),
        "held_on_host_bytes": one.held_on_host,
        "host_peak": None if one.host is None else _peak_figures(one.host),
        "flops": one.flops,
        "communications": [
            {"kind": kind, "axis": axis, "count": count, "num_bytes": num_bytes}
            for (kind, axis), (count, num_bytes) in one.totals.items()
        ],
    }


def _peak_figures(peak: Peak) -> dict[str, Any]:
    return {"bytes": peak.num_bytes, "bytes_of": peak.bytes_of, **peak.place._asdict()}


def _table(
    names: Sequence[str], rows: Iterable[tuple[str, str, Sequence[str]]], width: int
) -> list[str]:
    """Rows of (key, name, cells) under the `names` of the columns.

    Columns that do not fit into `width` follow in a second block.
    """
    rows = list(rows)
    label = max((len(name) for _, name, _ in rows), default=0)
    columns = [[" " * (4 + label), *(f"  {key or ' '} {name:{label}}" for key, name, _ in rows)]]
    for at, name in enumerate(names):
        cells = [name, *(cells[at] for _, _, cells in rows)]
        columns.append([f"{cell:>{max(map(len, cells))}}" for cell in cells])
    return beside(columns, width)


def _name(one: RankPlan) -> str:
    return f"rank {one.rank}"


def _place(one: RankPlan) -> str:
    place = one.peak.place
    phase = PHASE_NAMES.get(place.phase, "the step")
    return f"{phase}, {place.module}" if place.module else phase


def _axis_name(axis: str) -> str:
    return f"{axis} ({AXIS_NAMES[axis]})" if axis in AXIS_NAMES and axis != "world" else axis


def _in_order(of_axis: Mapping[str, T]) -> dict[str, T]:
    """The axes from tp to world, then others."""
    known = [axis for axis in AXIS_SHARES if axis in of_axis]
    return {axis: of_axis[axis] for axis in dict.fromkeys([*known, *of_axis])}


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.2%}"


def _paint(share: Share, text: str, color: bool) -> str:
    if not color:
        return text
    red, green, blue = (int(share.color[i : i + 2], 16) for i in (1, 3, 5))
    ink = "0;0;0" if red + green + blue > 330 else "255;255;255"
    return f"\033[38;2;{ink};48;2;{red};{green};{blue}m{text}\033[0m"

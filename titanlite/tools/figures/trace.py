"""A timeline as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""

import json

from titanlite.schedule.walk import Span
from titanlite.tools.figures.timeline import LANES, NAMES, Timeline


def make_trace(timeline: Timeline) -> str:
    """`timeline` as trace-event JSON, with one thread per row and one counter per curve.

    Trace times are in microseconds. A timeline in seconds keeps its true times; for any other
    unit, one unit becomes one millisecond.
    Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """
    factor = 1e6 if timeline.unit == "s" else 1e3
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": timeline.title}}
    ]
    for row, name in enumerate(timeline.rows):
        of_row: dict[str, object] = {"ph": "M", "pid": 0, "tid": row}
        events.append({**of_row, "name": "thread_name", "args": {"name": name}})
        events.append({**of_row, "name": "thread_sort_index", "args": {"sort_index": row}})
    for number, span in enumerate(timeline.spans):
        if span.kind in LANES:
            # Several go on at once, which slices of a thread cannot show.
            events += _asynchronous(number, span, factor)
            continue
        events.append(
            {
                "ph": "X",
                "name": timeline.label(span) or NAMES.get(span.kind, span.kind),
                "cat": NAMES.get(span.kind, span.kind),
                "pid": 0,
                "tid": span.row,
                "ts": span.start * factor,
                "dur": (span.end - span.start) * factor,
                "args": {"stage": span.stage, "microbatch": span.microbatch},
            }
        )
    for name, curve in timeline.curves.items():
        for time, value in curve:
            events.append(
                {
                    "ph": "C",
                    "name": f"{timeline.curves_label}: {name}",
                    "pid": 0,
                    "ts": time * factor,
                    "args": {"held": value},
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def lane_name(kind: str) -> str:
    return NAMES[kind].partition(",")[0]


def _asynchronous(number: int, span: Span, factor: float) -> list[dict[str, object]]:
    """The beginning and the end of a span in a track of its own below its row."""
    name = lane_name(span.kind)
    common: dict[str, object] = {"name": name, "cat": name, "id": number, "pid": 0, "tid": span.row}
    return [
        {**common, "ph": "b", "ts": span.start * factor},
        {**common, "ph": "e", "ts": span.end * factor},
    ]

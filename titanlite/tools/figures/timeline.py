"""Timeline: what ran when. Every picture is drawn from this one structure.

A `Timeline` comes from a schedule (`walk`), from a simulation, or from the measured times of a
real run. The other modules draw it, and export it as a trace, wherever it came from.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from titanlite.schedule.actions import Action, Schedule
from titanlite.schedule.walk import WORK, Span, bubbles, in_steps, run_schedule

# What a real rank communicates beside its work, of which several go on at once: a lane each.
SEND_TO, RECEIVE, GATHER, REDUCE, EXCHANGE = "SEND_TO", "RECEIVE", "GATHER", "REDUCE", "EXCHANGE"
LANES = (SEND_TO, RECEIVE, GATHER, REDUCE, EXCHANGE)

# The text of a cell for each kind of action; other kinds are drawn without text.
SCHEDULE_LETTERS = {"F": "F", "B": "B", "I": "B", "W": "W"}

NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, input gradient",
    "W": "backward, weight gradient",
    "FETCH": "weight fetch",
    "REDUCE_GRAD": "gradient reduction",
    "SEND": "transfer",
    SEND_TO: "send posted",
    RECEIVE: "receive, with its wait",
    GATHER: "gather",
    REDUCE: "reduction",
    EXCHANGE: "exchange",
}


@dataclass(frozen=True)
class Timeline:
    """Spans on named rows, in `unit` ("steps", "s"), and curves to draw below them.

    `curves` maps a row's name to (time, value) corners of a step function, such as the
    activations a rank holds; `curves_label` says what is counted. `caption` is one line of
    figures under the title. If `until` is later than the end, the time axis extends to `until`, so
    several pictures can share one scale. `cells_show` is "stage" or "batch", in text. A picture's
    cells have their microbatch as text and their kind as colour; with `is_by_stage`, what a text
    has, and the microbatch as colour.
    """

    title: str
    rows: list[str]
    spans: list[Span]
    unit: str = "steps"
    caption: str = ""
    batches_are: str = "microbatch"
    cells_show: str = "stage"
    letters: Mapping[str, str] = field(default_factory=lambda: SCHEDULE_LETTERS)
    curves: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)
    curves_label: str = ""
    until: float = 0
    is_by_stage: bool = False

    @cached_property
    def start(self) -> float:
        return min((span.start for span in self.spans), default=0)

    @cached_property
    def end(self) -> float:
        return max((span.end for span in self.spans), default=0)

    @cached_property
    def lanes(self) -> list[str]:
        """The kinds of LANES that there are."""
        found = {span.kind for span in self.spans}
        return [kind for kind in LANES if kind in found]

    @property
    def drawn_end(self) -> float:
        return max(self.end, self.until)

    @cached_property
    def num_microbatches(self) -> int:
        return 1 + max((span.microbatch or 0 for span in self.spans), default=0)

    def label(self, span: Span) -> str:
        """The text of a cell: a letter for the kind of work, and the stage or the microbatch."""
        letter = self.letters.get(span.kind)
        number = span.microbatch if self.cells_show == "batch" else span.stage
        return "" if letter is None or number is None else f"{letter}{number}"

    def cell(self, span: Span) -> str:
        """The text of a cell in a picture."""
        label = self.label(span)
        is_whole = self.is_by_stage or not label or span.microbatch is None
        return label if is_whole else f"{span.microbatch}"

    @cached_property
    def chunks(self) -> dict[tuple[int, int | None], int]:
        """The place of each (row, stage) among the stages of its row."""
        found = sorted({(s.row, s.stage or 0) for s in self.spans if s.kind in WORK})
        first = {row: place for place, (row, _) in reversed(list(enumerate(found)))}
        return {(row, stage): n - first[row] for n, (row, stage) in enumerate(found)}

    def describe(self, span: Span) -> str:
        """One line for a tooltip: row, work, start and end."""
        what = NAMES.get(span.kind, span.kind)
        if span.stage is not None:
            what += f", stage {span.stage}"
        if span.microbatch is not None:
            what += f", {self.batches_are} {span.microbatch}"
        return f"{self.rows[span.row]}: {what}; {span.start:g} to {span.end:g} {self.unit}"

    def bubbles(self) -> list[float]:
        """The bubble fraction of each row: its idle share of the time from `start` to `end`."""
        return bubbles(len(self.rows), self.spans)


def walk(schedule: Schedule, duration: Callable[[int, Action], float] = in_steps) -> Timeline:
    """The times of a schedule's compute actions, as `run_schedule` finds them, for drawing."""
    spans = run_schedule(schedule, duration)
    rows = [f"rank {rank}" for rank in range(schedule.num_ranks)]
    curves = activation_curves(rows, spans)
    return Timeline(
        schedule.name, rows, spans, curves=curves, curves_label="activations held, by rank"
    )


def activation_curves(
    rows: Iterable[str], spans: Iterable[Span]
) -> dict[str, list[tuple[float, float]]]:
    """The number of stage inputs each row holds over time, as corners of step functions.

    The row that runs the backward holds the input, from the start of the forward to the end of
    the backward (to the end of the weight gradient if the backward is split).
    """
    names = list(rows)
    started: dict[tuple[int | None, int | None], float] = {}
    released: dict[tuple[int | None, int | None], tuple[float, int]] = {}
    for span in spans:
        work = span.stage, span.microbatch
        if span.kind == "F":
            started[work] = span.start
        elif span.kind in ("B", "I", "W"):
            end = max(span.end, released[work][0]) if work in released else span.end
            released[work] = end, span.row
    changes: list[list[tuple[float, int]]] = [[] for _ in names]
    for work, (end, row) in released.items():
        if work in started:
            changes[row] += ((started[work], 1), (end, -1))
    curves = {}
    for name, row_changes in zip(names, changes, strict=True):
        held, corners = 0, {0.0: 0.0}
        for time, change in sorted(row_changes):
            held += change
            corners[time] = held
        curves[name] = list(corners.items())
    return curves

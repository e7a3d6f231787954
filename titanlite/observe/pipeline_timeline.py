"""What each rank of a pipeline did when: recorded in a real step, gathered, drawn and traced.

The clock is read where a stage begins and ends a forward pass, a backward pass or a part of one;
what lies between, waiting for another rank and moving data, is the bubble.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.drawing.schedule_svg import draw_svg
from titanlite.schedule import Span, Timeline
from titanlite.schedule.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from titanlite.schedule.timeline import activation_curves
from titanlite.schedule.trace import make_trace


class PipelineRecorder:
    """Notes start and end of each action of this rank's `stages`, from its making on.

    `stages` are objects with the methods of torch.distributed.pipelining's PipelineStage, which are
    wrapped in place. On CUDA each action is waited for, so that its end is seen: a recorded step
    takes longer. `spans` holds seconds of a clock that all processes of one machine share.
    """

    def __init__(self, stages: Sequence[Any], row: int, device: torch.device) -> None:
        self.spans: list[Span] = []
        self._row, self._device = row, device
        for stage in stages:
            for method, kind in (
                ("forward_one_chunk", FORWARD),
                ("backward_one_chunk", FULL_BACKWARD),
                ("backward_weight_one_chunk", BACKWARD_WEIGHT),
            ):
                run = getattr(stage, method)
                setattr(stage, method, self._recorded(run, kind, stage.stage_index))

    def take(self) -> list[Span]:
        """The spans noted since the last call."""
        spans, self.spans = self.spans, []
        return spans

    def count_in(self) -> None:
        """Let the last action end now: the loss belongs to the last stage's forward pass."""
        self.spans[-1] = self.spans[-1]._replace(end=self._now())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _recorded(self, run: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        @functools.wraps(run)
        def recorded(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            is_split = kind == FULL_BACKWARD and not kwargs.get("full_backward", True)
            start = self._now()
            result = run(microbatch, *args, **kwargs)
            name = BACKWARD_INPUT if is_split else kind
            self.spans.append(Span(self._row, start, self._now(), name, stage, microbatch))
            return result

        return recorded


def gather_timeline(
    spans: Sequence[Span], group: dist.ProcessGroup, title: str, *, one_machine: bool = True
) -> Timeline | None:
    """The spans of all ranks of `group` as one timeline in milliseconds, on its first rank.

    Every rank of the group must call this; None on all but the first. Over several machines the
    spans are put on their wall clocks, and are as good as those agree.
    """
    offset = 0.0 if one_machine else time.time() - time.perf_counter()
    own = [span._replace(start=span.start + offset, end=span.end + offset) for span in spans]
    of_ranks: list[list[Span]] = [[] for _ in range(dist.get_world_size(group))]
    is_first = dist.get_rank(group) == 0
    dist.gather_object(own, of_ranks if is_first else None, group=group, group_dst=0)
    if not is_first:
        return None
    rows = [f"rank {place}" for place in range(len(of_ranks))]
    first = min(span.start for of_rank in of_ranks for span in of_rank)
    moved = [
        span._replace(start=1e3 * (span.start - first), end=1e3 * (span.end - first))
        for of_rank in of_ranks
        for span in of_rank
    ]
    bubbles = Timeline(title, rows, moved).bubbles()
    return Timeline(
        title,
        rows,
        moved,
        unit="ms",
        caption=f"measured bubble, by rank: {', '.join(f'{part:.0%}' for part in bubbles)}",
        curves=activation_curves(rows, moved),
        curves_label="activations held, by rank",
    )


def save_timeline(timeline: Timeline, folder: Path, name: str) -> Path:
    """Write `name`.svg, the diagram, and `name`.json, a trace for Perfetto; the diagram's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(make_trace(timeline))
    diagram = folder / f"{name}.svg"
    diagram.write_text(draw_svg(timeline))
    return diagram

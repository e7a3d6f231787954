"""The timeline of a real pipeline step: recorded, gathered from all ranks, and drawn.

It has the start and end of each forward pass, backward pass, and part of a split backward pass of a
stage, and the sends, receives, gathers and reductions of the same run (communication.py). The
remaining time is the bubble.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlite.job import Job
from titanlite.schedule import Span
from titanlite.schedule.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD
from titanlite.tools.figures.schedule_svg import draw_svg
from titanlite.tools.figures.timeline import Timeline, activation_curves
from titanlite.tools.figures.trace import make_trace
from titanlite.tools.gallery.communication import recording_communication


class PipelineRecorder:
    """Records what this rank does in each run of a pipeline schedule while `is_on` is true.

    `pipeline` has `stages` with the methods of torch.distributed.pipelining's PipelineStage, and a
    `step` that runs the schedule once; these are wrapped in place. On CUDA the recorder
    synchronizes after each action to measure its end, so a recorded step takes longer. `row` is
    this rank's row in the timeline.
    """

    def __init__(self, pipeline: Any, row: int, device: torch.device) -> None:
        self.is_on = True
        self._spans: list[Span] = []
        self._moves: list[Span] = []
        self._row, self._device = row, device
        for stage in pipeline.stages:
            for method, kind in (
                ("forward_one_chunk", FORWARD),
                ("backward_one_chunk", FULL_BACKWARD),
                ("backward_weight_one_chunk", BACKWARD_WEIGHT),
            ):
                run = getattr(stage, method)
                setattr(stage, method, self._recorded(run, kind, stage.stage_index))
        pipeline.step = self._recorded_run(pipeline.step)
        pipeline.on_loss = self._count_in

    def take(self) -> list[Span]:
        """The spans of the last recorded run, in seconds of a clock shared by a machine's ranks.

        Computation comes first, in order, then communication. Clears the record.
        """
        spans = [*self._spans, *self._moves]
        self._spans, self._moves = [], []
        return spans

    def _count_in(self) -> None:
        """Extend the last action to now: the loss belongs to the last stage's forward pass."""
        if self.is_on:
            self._spans[-1] = self._spans[-1]._replace(end=self._now())

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _recorded_run(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return run(*args, **kwargs)
            # With accumulation a step has several runs; only the last one is kept.
            self._spans = []
            with recording_communication(self._row) as moves:
                result = run(*args, **kwargs)
            self._moves = moves
            return result

        return recorded

    def _recorded(self, run: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        @functools.wraps(run)
        def recorded(microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return run(microbatch, *args, **kwargs)
            is_split = kind == FULL_BACKWARD and not kwargs.get("full_backward", True)
            start = self._now()
            result = run(microbatch, *args, **kwargs)
            name = BACKWARD_INPUT if is_split else kind
            self._spans.append(Span(self._row, start, self._now(), name, stage, microbatch))
            return result

        return recorded


def draw_steps(
    job: Job, folder: Path, say: Callable[[str], None], first_step: int
) -> Callable[[int], None]:
    """Draw the step at every profiling.profile_freq and the last one, as SVG and Chrome trace.

    Returns the function to call after each step, on every rank; rank 0 writes to `folder`.
    """
    pipeline = job.pipeline
    assert pipeline is not None
    recorder = PipelineRecorder(pipeline, job.world.rank, job.world.device)
    places = [job.dims.describe_place(rank) for rank in range(job.world.size)]

    def is_drawn(step: int) -> bool:
        return step % job.config.profiling.profile_freq == 0 or step == job.config.training.steps

    def after(step: int) -> None:
        was_on, recorder.is_on = recorder.is_on, is_drawn(step + 1)
        if not was_on:
            return
        timeline = gather_timeline(
            recorder.take(),
            places,
            f"{pipeline.table.name}, step {step}",
            one_machine=job.world.local_size == job.world.size,
        )
        if timeline is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"pipeline_step_{step}.svg"
            path.with_suffix(".json").write_text(make_trace(timeline))
            path.write_text(draw_svg(timeline))
            say(f"pipeline timeline: {path}; {timeline.caption}")

    recorder.is_on = is_drawn(first_step)
    return after


def gather_timeline(
    spans: Sequence[Span], places: Sequence[str], title: str, *, one_machine: bool = True
) -> Timeline | None:
    """Gather the spans of all ranks into one timeline in milliseconds, on rank 0.

    Every rank must call this; the others get None. `places` has each rank's coordinates on the
    mesh, such as "pp 1, tp 0". On several machines the times are wall-clock times, only as accurate
    as the clocks agree.
    """
    offset = 0.0 if one_machine else time.time() - time.perf_counter()
    own = [span._replace(start=span.start + offset, end=span.end + offset) for span in spans]
    of_ranks: list[list[Span]] = [[] for _ in places]
    is_first = dist.get_rank() == 0
    dist.gather_object(own, of_ranks if is_first else None, dst=0)
    if not is_first:
        return None
    return make_timeline(of_ranks, places, title)


def make_timeline(
    of_ranks: Sequence[Sequence[Span]], places: Sequence[str], title: str
) -> Timeline:
    """A timeline in milliseconds, one row per rank, from spans in seconds of one clock."""
    rows = [f"rank {rank} ({place})" for rank, place in enumerate(places)]
    first = min(span.start for of_rank in of_ranks for span in of_rank)
    moved = [
        [
            span._replace(start=1e3 * (span.start - first), end=1e3 * (span.end - first))
            for span in of_rank
        ]
        for of_rank in of_ranks
    ]
    curves: dict[str, list[tuple[float, float]]] = {}
    for name, of_rank in zip(rows, moved, strict=True):
        # One rank at a time, because ranks that share a stage run the same microbatches.
        curves |= activation_curves([name], [span._replace(row=0) for span in of_rank])
    spans = [span for of_rank in moved for span in of_rank]
    bubbles = Timeline(title, rows, spans).bubbles()
    return Timeline(
        title,
        rows,
        spans,
        unit="ms",
        caption=f"measured bubble, by rank: {', '.join(f'{part:.0%}' for part in bubbles)}",
        curves=curves,
        curves_label="activations held, by rank",
    )

"""Predicted against measured timelines of pipelines, in wall time.

    python tests/benchmarks/plan_timelines.py [--steps 8] [--svg FOLDER]

CPU-seconds see neither overlap nor bubbles. Here the blocks of a small model pause
(paused_model.py), so the seconds of the passes are known and hardly depend on what else the machine
does; schedule, messages and gloo are real. The link is that of the machine, or a slow one
(slow_link.py).
"""

import argparse
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.paused_model import with_pauses
from tests.benchmarks.slow_link import slow_link, with_link
from titanlite.config import JobConfig, resolve_job
from titanlite.ranks.launch import Place, spawn
from titanlite.schedule import Span
from titanlite.schedule.actions import BACKWARD_INPUT, FORWARD, FULL_BACKWARD
from titanlite.schedule.walk import WORK
from titanlite.tools.figures.timeline import Timeline
from titanlite.tools.gallery.pipeline_timeline import PipelineRecorder, make_timeline
from titanlite.tools.planner.hardware import Hardware, load_hardware
from titanlite.tools.planner.planning import PIECES, plan_job
from titanlite.tools.planner.predict import WAIT_FOR_SENDS
from titanlite.tools.planner.spans import draw_schedules, step_spans
from titanlite.tools.planner.spans import make_timeline as predicted_timeline

PASSES = (FORWARD, FULL_BACKWARD, BACKWARD_INPUT)
"""Actions that wait for an input and send an output."""
Key = tuple[int, str, int | None, int | None]


@dataclass(frozen=True)
class Case:
    """A pipeline of `ranks` ranks, and the latency of its link: 0 for that of the machine."""

    name: str
    schedule: str
    ranks: int
    num_microbatches: int
    latency_seconds: float = 0.0
    bytes_per_second: float = 1e9

    def config(self) -> JobConfig:
        return JobConfig.from_dict(
            {
                "experimental": {"custom_import": "tests.benchmarks.paused_model"},
                "model": {"name": "paused"},
                "training": {
                    "dataset": "synthetic",
                    "seq_len": 16,
                    "global_batch_size": self.num_microbatches,
                    "local_batch_size": self.num_microbatches,
                },
                "parallelism": {
                    "data_parallel_shard_degree": 1,
                    "pipeline_parallel_degree": self.ranks,
                    "pipeline_parallel_schedule": self.schedule,
                    "pipeline_parallel_microbatch_size": 1,
                    "pipeline_parallel_first_stage_less_layers": 0,
                    "pipeline_parallel_last_stage_less_layers": 0,
                },
                "activation_checkpoint": {"mode": "none"},
            }
        )


CASES = (
    Case("1F1B, 4 ranks", "1F1B", 4, 6),
    Case("interleaved 1F1B, 2 ranks", "Interleaved1F1B", 2, 6),
    Case("DualPipeV, 2 ranks", "DualPipeV", 2, 6),
    Case("1F1B, 4 ranks, slow link", "1F1B", 4, 6, 0.06),
    Case("interleaved 1F1B, 2 ranks, slow link", "Interleaved1F1B", 2, 6, 0.06),
)


@dataclass(frozen=True)
class Comparison:
    """Two timelines of one step, in milliseconds from its first action."""

    case: Case
    predicted: Timeline
    measured: Timeline

    @property
    def step_error(self) -> float:
        """The relative error of the predicted time from the first action to the last."""
        return _length(self.predicted) / _length(self.measured) - 1

    @property
    def longer_actions(self) -> float:
        """The part of the measured step by which longer actions prolong the predicted one."""
        return (self.replayed - _length(self.predicted)) / _length(self.measured)

    @property
    def between_actions(self) -> float:
        """The part of the measured step that messages take beside their time on the link."""
        return 1 - self.replayed / _length(self.measured)

    @property
    def replayed(self) -> float:
        """The length of the step with the measured actions in their order, in milliseconds."""
        waits_for_sends = self.case.schedule in WAIT_FOR_SENDS
        return _replay(self.measured, 1e3 * self.case.latency_seconds, waits_for_sends)

    @property
    def bubble_errors(self) -> list[float]:
        """Predicted minus measured share of idle time, by rank."""
        pairs = zip(_bubbles(self.predicted), _bubbles(self.measured), strict=True)
        return [predicted - measured for predicted, measured in pairs]

    @property
    def start_errors(self) -> list[float]:
        """How much later each action starts than predicted, as a share of the step."""
        predicted, measured = _starts(self.predicted), _starts(self.measured)
        assert predicted.keys() == measured.keys()
        whole = _length(self.measured)
        return [(measured[key] - predicted[key]) / whole for key in predicted]


def _work(timeline: Timeline) -> list[Span]:
    """Without the I of the first stage, which sends no gradient: it is empty."""
    work = [span for span in timeline.spans if span.kind in WORK]
    return [span for span in work if (span.kind, span.stage) != ("I", 0)]


def _length(timeline: Timeline) -> float:
    work = _work(timeline)
    return max(span.end for span in work) - min(span.start for span in work)


def _bubbles(timeline: Timeline) -> list[float]:
    whole, rows = _length(timeline), range(len(timeline.rows))
    busy = [sum(s.end - s.start for s in _work(timeline) if s.row == row) for row in rows]
    return [1 - one / whole for one in busy]


def _starts(timeline: Timeline) -> dict[Key, float]:
    work = _work(timeline)
    first = min(span.start for span in work)
    return {(one.row, one.kind, one.stage, one.microbatch): one.start - first for one in work}


def _replay(timeline: Timeline, latency: float, waits_for_sends: bool) -> float:
    """The length of a step in which each action starts as soon as its rank and its input allow."""
    work = sorted(_work(timeline), key=lambda one: one.start)
    row_of = {one.stage: one.row for one in work}
    last = max(stage for stage in row_of if stage is not None)
    free: dict[int, float] = defaultdict(float)
    links: dict[tuple[int, int], float] = defaultdict(float)
    arrived: dict[tuple[bool, int, int | None], float] = {}
    sent: dict[int, tuple[bool, float]] = {}
    for one in work:
        stage, is_forward = one.stage, one.kind == FORWARD
        assert stage is not None
        needed = is_forward, stage, one.microbatch
        start = max(free[one.row], arrived.get(needed, 0.0) if one.kind in PASSES else 0.0)
        if waits_for_sends and one.row in sent and sent[one.row][0] != is_forward:
            start = max(start, sent[one.row][1])
        end = free[one.row] = start + one.end - one.start
        to = stage + (1 if is_forward else -1)
        if one.kind not in PASSES or not 0 <= to <= last:
            continue
        if row_of[to] != one.row:
            link = one.row, row_of[to]
            end = max(end, links[link])
            if waits_for_sends:
                free[one.row] = end
            end = links[link] = end + latency
            sent[one.row] = is_forward, end
        arrived[is_forward, to, one.microbatch] = end
    return max(free.values())


def run_case(place: Place, case: Case, num_steps: int) -> list[list[Span]]:
    """The spans of each step on this rank, without the first."""
    import torch

    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    found = []
    with open_world(place) as world, contextlib.ExitStack() as stack:
        torch.set_num_threads(1)
        job = build_job(resolve_job(case.config(), world.size), world)
        recorder = PipelineRecorder(job.pipeline, world.rank, world.device)
        if case.latency_seconds:
            stack.enter_context(slow_link(case.latency_seconds, case.bytes_per_second))
        for _ in range(num_steps + 1):
            torch.distributed.barrier()
            job.step()
            found.append(recorder.take())
    return found[1:]


def measure(case: Case, num_steps: int) -> Timeline:
    """The fastest step: what other processes add is never negative."""
    of_steps = zip(*spawn(run_case, case.ranks, case, num_steps), strict=True)
    places = [f"pp {rank}" for rank in range(case.ranks)]
    timelines = [make_timeline(of_ranks, places, case.name) for of_ranks in of_steps]
    return min(timelines, key=_length)


def predict(case: Case, hardware: Hardware) -> Timeline:
    hardware = with_pauses(hardware)
    if case.latency_seconds:
        hardware = with_link(hardware, case.latency_seconds, case.bytes_per_second)
    plan = plan_job(resolve_job(case.config(), None), hardware, method=PIECES)
    return predicted_timeline(step_spans(plan), plan.dims)


def compare(case: Case, hardware: Hardware, num_steps: int = 8) -> Comparison:
    return Comparison(case, predict(case, hardware), measure(case, num_steps))


def describe(found: Comparison) -> str:
    starts = [abs(one) for one in found.start_errors]
    bubbles = ", ".join(f"{one:.0%}" for one in _bubbles(found.measured))
    expected = ", ".join(f"{one:.0%}" for one in _bubbles(found.predicted))
    return (
        f"{found.case.name:38} step {_length(found.measured):7.0f} ms, predicted "
        f"{_length(found.predicted):7.0f} ({found.step_error:+.1%}); bubbles {bubbles}, predicted "
        f"{expected}; of the step, longer actions are {found.longer_actions:.1%} and messages "
        f"{found.between_actions:.1%}; starts differ by {statistics.fmean(starts):.1%} of the "
        f"step, at most {max(starts):.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hardware", default="cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--svg", type=Path, help="a folder for a picture of each case")
    options = parser.parse_args(arguments)
    hardware: Any = load_hardware(options.hardware)
    for case in CASES:
        found = compare(case, hardware, options.steps)
        print(describe(found), flush=True)
        if options.svg is not None:
            name = case.name.replace(",", "").replace(" ", "_")
            picture = draw_schedules(found.predicted, found.measured)
            (options.svg / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()

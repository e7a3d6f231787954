"""What is shown of a plan: bars, tables, figures, and the spans of a predicted step."""

import itertools
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from titanlite.config import JobConfig, resolve_job
from titanlite.tools.figures.trace import make_trace
from titanlite.tools.planner.hardware import load_hardware
from titanlite.tools.planner.planning import PIECES, JobPlan, plan_job
from titanlite.tools.planner.report import IDLE, MEMORY_SHARES, draw_bar, figures, show, time_shares
from titanlite.tools.planner.spans import LANE_OF, draw_schedules, make_timeline, step_spans
from titanlite.tools.simulate.streams import MAIN

P, G, O = MEMORY_SHARES[:3]  # noqa: E741


def make_plan(hardware: str | None = "h100", **parallelism: Any) -> JobPlan:
    config = JobConfig.from_dict(
        {
            "model": {"flavor": "debug"},
            "training": {
                "dataset": "synthetic",
                "global_batch_size": 16,
                "local_batch_size": 8,
                "seq_len": 64,
            },
            "activation_checkpoint": {"mode": "none"},
            "parallelism": {"data_parallel_shard_degree": 2, **parallelism},
        }
    )
    device = load_hardware(hardware) if hardware else None
    return plan_job(resolve_job(config, None), device, method=PIECES, use_cache=False)


@pytest.fixture(scope="module")
def pipelined() -> JobPlan:
    return make_plan(pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=2)


@pytest.fixture(scope="module")
def sharded() -> JobPlan:
    return make_plan()


def test_a_bar_ends_where_its_values_do() -> None:
    assert draw_bar({P: 10, G: 20, O: 5}, 40, 40) == "P" * 10 + "G" * 20 + "O" * 5 + " " * 5
    # Shares smaller than a character do not add up to a longer bar.
    thirds = dict.fromkeys(MEMORY_SHARES, 1 / 3)
    assert len(draw_bar(thirds, 7 / 3, 40).rstrip()) == 40
    assert draw_bar({P: 30, G: 30}, 60, 7, mark=40) == "PPPG|GG"
    assert draw_bar({P: 1}, 4, 5, mark=4) == "P   |"
    painted = draw_bar({P: 1, G: 0}, 1, 2, color=True)
    assert painted.count("\033[0m") == 2
    assert "48;2;0;114;178m" in painted


@pytest.mark.parametrize("width", [80, 120])
def test_all_sections_fit_the_width(pipelined: JobPlan, width: int) -> None:
    pipelined.warnings[:] = ["a warning " * 20]
    pipelined.notes[:] = ["a note"]
    shown = show(pipelined, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.isascii()
    assert "on rank 0, whose tensors take " in " ".join(shown.split())
    for text in (
        "4 ranks: pp 2 x dp_shard 2",
        "NVIDIA H100",
        " tokens/s/rank\nMFU ",
        "P parameters",
        "M matrix products",
        "dp_shard (FSDP)",
        "pp (PP)",
        "predicted step",
        "warning: a warning",
        "note: a note",
    ):
        assert text in shown
    for one in pipelined.ranks:
        assert f"rank {one.rank}" in shown


def test_without_hardware_there_is_no_time() -> None:
    plan = make_plan(None)
    shown = show(plan, width=80)
    assert "memory of a rank" in shown
    assert "reduce_scatter" in shown
    assert "time of a rank" not in shown
    assert figures(plan)["time"] is None
    assert step_spans(plan) == []


def test_shares_of_time_add_up_to_the_step(pipelined: JobPlan) -> None:
    assert pipelined.prediction is not None
    step = pipelined.prediction.step
    for segment in step.ranks.values():
        shares = time_shares(segment)
        assert sum(shares.values()) == pytest.approx(step.seconds)
        assert shares[IDLE] == segment.idle_seconds


def test_the_figures_are_json(pipelined: JobPlan) -> None:
    found = json.loads(json.dumps(figures(pipelined), allow_nan=False))
    assert found["num_ranks"] == 4
    assert found["degrees"]["pp"] == 2
    assert found["hardware"]["memory_bytes"] == load_hardware("h100").memory.num_bytes
    assert pipelined.prediction is not None
    assert found["time"]["bubble"] == pipelined.prediction.bubble > 0
    for rank, one in zip(found["ranks"], pipelined.ranks, strict=True):
        assert rank["held_bytes"] == one.held
        counts = {
            (c["kind"], c["axis"]): (c["count"], c["num_bytes"]) for c in rank["communications"]
        }
        assert counts == one.totals


def test_the_spans_of_a_pipeline_are_those_of_its_clock(pipelined: JobPlan) -> None:
    spans, prediction = step_spans(pipelined), pipelined.prediction
    assert prediction is not None
    actions = [(s.start, s.end, s.kind, s.stage) for s in spans if s.stage is not None]
    timeline = prediction.timeline
    assert sorted(a for a in actions if a[2] in "FBIW") == sorted(
        (s.start, s.end, s.kind, s.stage) for s in timeline.spans if s.kind in "FBIW"
    )
    busy = sum(s.end - s.start for s in spans if s.rank == 0 and s.stream == "dp_shard")
    assert busy == pytest.approx(prediction.step.ranks[0].axes["dp_shard"].busy_seconds)
    sent = [s for s in spans if s.kind == "send" and s.rank == 0]
    received = [s for s in spans if s.kind == "receive" and s.rank == 2]
    assert [s.start for s in sent] == [s.start for s in received]
    assert len(sent) == pipelined.ranks[0].totals["send", "pp"][0]
    only = step_spans(pipelined, [2])
    assert only == [s for s in spans if s.rank == 2]


def test_the_spans_without_a_pipeline_name_their_modules(sharded: JobPlan) -> None:
    spans = step_spans(sharded)
    assert sharded.prediction is not None
    work = [s for s in spans if s.stream == MAIN]
    assert max(s.end for s in spans) == pytest.approx(sharded.prediction.step.seconds)
    for before, after in itertools.pairwise(work):
        assert before.end <= after.start + 1e-12
    blocks = {s.name.split("layers.")[1].split(".")[0] for s in work if "layers." in s.name}
    assert len(blocks) > 1
    first = {block: min(s.start for s in work if f"layers.{block}" in s.name) for block in blocks}
    assert sorted(blocks, key=int) == sorted(blocks, key=first.__getitem__)
    assert not any("*" in one.peak.place.module for one in sharded.ranks)


def test_the_trace_has_the_form_of_a_measured_one(pipelined: JobPlan) -> None:
    timeline = make_timeline(step_spans(pipelined), pipelined.dims)
    assert timeline.rows[0] == f"rank 0 ({pipelined.dims.describe_place(0)})"
    assert timeline.unit == "ms"
    assert set(timeline.lanes) <= set(LANE_OF.values())
    events = json.loads(make_trace(timeline))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert {"F0", "F1", "B0", "B1"} <= set(names)
    assert {event["name"] for event in events if event["ph"] == "b"} >= {"gather", "send posted"}


def test_predicted_and_measured_pipelines_are_drawn_on_one_scale(pipelined: JobPlan) -> None:
    predicted = make_timeline(step_spans(pipelined), pipelined.dims)
    measured = replace(
        predicted,
        title="1F1B, step 5",
        spans=[s._replace(start=s.start + 100, end=s.end + 100) for s in predicted.spans],
    )
    picture = draw_schedules(predicted, measured)
    assert "predicted step" in picture
    assert "measured: 1F1B, step 5" in picture
    # Both start at 0, so that every cell is at the same place twice.
    cells = re.findall(r"<rect x='([\d.]+)' y='[\d.]+' width='([\d.]+)'[^>]*><title>", picture)
    assert cells
    assert all(count % 2 == 0 for count in Counter(cells).values())
    alone = draw_schedules(predicted)
    assert "measured" not in alone

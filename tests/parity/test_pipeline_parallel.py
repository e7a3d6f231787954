"""A pipeline trains exactly as one process does: every schedule, and with each other feature."""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training import FEW_STEPS, STEPS, Sections, Training, debug_config, differences, train

from titanlite.config import JobConfig, resolve_job
from titanlite.job import build_job
from titanlite.parallelize.pipeline_parallel.apply import open_pairs
from titanlite.ranks.launch import Place, spawn
from titanlite.ranks.world import open_world
from titanlite.schedule import make_schedule, write_csv
from titanlite.schedule.walk import WORK
from titanlite.tools.figures.timeline import GATHER, RECEIVE, REDUCE, SEND_TO, walk
from titanlite.tools.gallery.pipeline_timeline import PipelineRecorder, gather_timeline
from titanlite.tools.sample.generate import sample_sequences

TOLERANCE = 1e-11
JOB: Sections = {"model": {"num_layers": 6}, "training": {"local_batch_size": 8}}


def pipelined(
    schedule: str = "1F1B", degree: int = 2, batch: int = 8, **parallelism: Any
) -> dict[str, dict[str, Any]]:
    """Sections of a pipelined job; `batch` images of the 8 in a step go through at once."""
    return {
        "parallelism": {
            "pipeline_parallel_degree": degree,
            "pipeline_parallel_schedule": schedule,
            **{_full_name(key): value for key, value in parallelism.items()},
        },
        "training": {"local_batch_size": batch},
    }


def _full_name(key: str) -> str:
    is_own = key.startswith(("microbatch", "layers", "first", "last", "schedule"))
    return f"pipeline_parallel_{key}" if is_own else key


def with_compile(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {**sections, "compile": {"enable": True, "backend": "aot_eager"}}


def with_checkpoints(sections: dict[str, dict[str, Any]], mode: str) -> dict[str, dict[str, Any]]:
    return {**sections, "activation_checkpoint": {"mode": mode, "selective_ac_option": "op"}}


PARTS = [
    ["embeddings"],
    ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "norm", "output"],
]
TP, CP, SHARD, REPLICATE = (
    {"tensor_parallel_degree": 2},
    {"context_parallel_degree": 2},
    {"data_parallel_shard_degree": 2},
    {"data_parallel_replicate_degree": 2},
)
TWO_RANKS = {
    "GPipe": pipelined("GPipe"),
    "1F1B": pipelined("1F1B"),
    "Interleaved1F1B": pipelined("Interleaved1F1B"),
    "LoopedBFS": pipelined("LoopedBFS"),
    "InterleavedZeroBubble": pipelined("InterleavedZeroBubble"),
    "ZBVZeroBubble": pipelined("ZBVZeroBubble"),
    "DualPipeV": pipelined("DualPipeV"),
    "ZB-H1": pipelined("ZB-H1"),
    "four stages a rank": pipelined("Interleaved1F1B", layers_per_stage=1),
    "as many microbatches as stages": pipelined(microbatch_size=4),
    "fewer microbatches than stages": pipelined("ZBVZeroBubble", microbatch_size=4),
    "one microbatch": pipelined("GPipe", microbatch_size=8),
    "accumulation": pipelined(batch=4),
    "accumulation under a split backward": pipelined("ZBVZeroBubble", batch=4),
    "uneven stages": pipelined(first_stage_less_layers=3, last_stage_less_layers=0),
    "given parts": pipelined(module_fqns_per_model_part=PARTS),
    "full AC": with_checkpoints(pipelined(), "full"),
    "selective AC": with_checkpoints(pipelined(), "selective"),
    "AC under a split backward": with_checkpoints(pipelined("ZBVZeroBubble"), "full"),
    "compile": with_compile(pipelined("Interleaved1F1B")),
}
FOUR_RANKS = {
    "TP": pipelined(**TP),
    "TP under a split backward": pipelined("ZBVZeroBubble", **TP),
    "CP in a V": pipelined("DualPipeV", **CP),
    "FSDP, interleaved": pipelined("Interleaved1F1B", batch=4, **SHARD),
    "FSDP, accumulation": pipelined(batch=2, **SHARD),
    "DDP, accumulation": pipelined(batch=2, **REPLICATE),
    "four ranks, ZBV": pipelined("ZBVZeroBubble", 4, microbatch_size=2),
}
# Much like others.
SLOW = (
    *("LoopedBFS", "four stages a rank", "as many microbatches as stages", "one microbatch"),
    *("accumulation under a split backward", "uneven stages", "selective AC", "compile"),
    *("full AC", "InterleavedZeroBubble", "given parts"),
    *("TP", "FSDP, interleaved", "DDP, accumulation"),
)
EIGHT_RANKS = {
    "HSDP": pipelined(batch=2, **SHARD, **REPLICATE),
    "HSDP, accumulation, a split backward": pipelined(
        "ZBVZeroBubble", batch=2, microbatch_size=2, **SHARD, **REPLICATE
    ),
    "TP and CP": pipelined("Interleaved1F1B", **TP, **CP),
    "TP and FSDP": pipelined(batch=4, **TP, **SHARD),
    "TP and DDP": pipelined(batch=4, **TP, **REPLICATE),
}


@pytest.fixture(scope="module", params=[FEW_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)])
def length(request: pytest.FixtureRequest) -> Sections:
    return {"training": {"steps": request.param}}


@pytest.fixture(scope="module")
def reference(length: Sections) -> Training:
    return train([debug_config(JOB, length)])[0]


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, length: Sections
) -> Callable[[str], dict[str, Training]]:
    """What the jobs did of the tests that run, of all that have as many ranks as one of them."""
    tests = [item for item in request.session.items if item.originalname == "test_pipeline"]
    names = {test.callspec.params["name"] for test in tests}

    @functools.cache
    def of_ranks(number: int) -> dict[str, Training]:
        jobs = (TWO_RANKS, FOUR_RANKS, EIGHT_RANKS)[number]
        configs = {n: debug_config(JOB, length, job) for n, job in jobs.items() if n in names}
        return dict(zip(configs, train(list(configs.values())), strict=True))

    return lambda name: of_ranks((name not in TWO_RANKS) + (name in EIGHT_RANKS))


def assert_equal(training: Training, reference: Training) -> None:
    found = differences(training, reference)
    assert {what: error for what, error in found.items() if error > TOLERANCE} == {}
    assert len(set(training.digests)) == 1, "ranks see different whole weights"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW or name in EIGHT_RANKS))
        for name in (*TWO_RANKS, *FOUR_RANKS, *EIGHT_RANKS)
    ],
)
@pytest.mark.timeout(1200)
def test_pipeline(
    trained: Callable[[str], dict[str, Training]], reference: Training, name: str
) -> None:
    assert_equal(trained(name)[name], reference)


def test_schedule_from_a_file(tmp_path: Path, reference: Training, length: Sections) -> None:
    """A table that no name stands for: forwards two by two, in a V."""
    table = make_schedule("ZBVZeroBubble", 2, 8)
    write_csv(table, tmp_path / "v.csv")
    job = pipelined(schedule_csv=str(tmp_path / "v.csv"))
    (training,) = train([debug_config(JOB, length, job)])
    assert_equal(training, reference)


SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"]


def _observe(place: Place, configs: list[JobConfig]) -> list[dict[str, Any]]:
    seen = []
    with open_world(place) as world:
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            found: dict[str, Any] = {"before": job.evaluate()}
            if job.pipeline is not None:
                recorder = PipelineRecorder(job.pipeline, world.rank, world.device)
                job.step()
                spans = recorder.take()
                found["spans"] = spans
                found["table"] = job.pipeline.table
                places = [job.dims.describe_place(rank) for rank in range(world.size)]
                found["timeline"] = gather_timeline(spans, places, "run")
                recorder.is_on = False
            else:
                job.step()
            found["after"] = job.evaluate()
            job.step()
            found["images"] = sample_sequences(job, 3)
            seen.append(found)
    return seen


def test_what_runs_is_the_schedule_and_evaluation_and_sampling_are_as_without_one() -> None:
    more: Sections = {"validation": {"enable": True, "steps": 2, "local_batch_size": 4}}
    configs = [debug_config(JOB, more, pipelined(name)) for name in SCHEDULES]
    ((single,),) = spawn(_observe, 1, [debug_config(JOB, more)])
    of_ranks = spawn(_observe, 2, configs, timeout_seconds=200)
    for rank, of_rank in enumerate(of_ranks):
        for found in of_rank:
            table = found["table"]
            done = [(s.stage, s.kind, s.microbatch) for s in found["spans"] if s.kind in WORK]
            assert done == [(a.stage, a.kind, a.microbatch) for a in table.compute(rank)]
            for what in ("before", "after"):
                assert found[what] == pytest.approx(single[what], rel=1e-12)
            assert (found["images"] == single["images"]).all()
    for found in of_ranks[0]:
        timeline = found["timeline"]
        assert len(timeline.rows) == 2
        assert all(0 < bubble < 1 for bubble in timeline.bubbles())
        starts = {(s.stage, s.kind, s.microbatch): s for s in timeline.spans}
        # One clock: nothing starts before what it takes its input from has ended.
        assert starts[1, "F", 0].start >= starts[0, "F", 0].end
        planned = walk(found["table"]).curves
        for row, curve in timeline.curves.items():
            peak = max(value for _, value in curve)
            assert peak == max(value for _, value in planned[row.partition(" (")[0]])
    assert all(found["timeline"] is None for found in of_ranks[1])


DRAWN = [*SCHEDULES, "InterleavedZeroBubble", "ZB-H1"]


def _draw(place: Place, configs: dict[str, JobConfig]) -> dict[str, list[Any]]:
    """The timeline of the last of two steps; what this rank recorded in each."""
    drawn = {}
    with open_world(place) as world:
        for name, config in configs.items():
            job = build_job(resolve_job(config, world.size), world)
            recorder = PipelineRecorder(job.pipeline, world.rank, world.device)
            recorder.is_on = False
            job.step()
            unrecorded = recorder.take()
            recorder.is_on = True
            job.step()
            spans = recorder.take()
            places = [job.dims.describe_place(rank) for rank in range(world.size)]
            assert job.pipeline is not None
            timeline = gather_timeline(spans, places, "run")
            drawn[name] = [timeline, unrecorded, spans, job.pipeline.table]
    return drawn


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest) -> list[dict[str, list[Any]]]:
    small: Sections = {"parallelism": {"tensor_parallel_degree": 2}, "model": {"num_layers": 4}}
    of = "test_every_rank_has_its_row_its_name_and_what_it_sent"
    tests = [item for item in request.session.items if item.originalname == of]
    names = sorted({test.callspec.params["name"] for test in tests})
    pipelines = {name: pipelined(name, microbatch_size=2) for name in names}
    configs = {name: debug_config(JOB, one, small) for name, one in pipelines.items()}
    return spawn(_draw, 4, configs, timeout_seconds=200)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("Interleaved1F1B", "ZB-H1")))
        for name in DRAWN
    ],
)
def test_every_rank_has_its_row_its_name_and_what_it_sent(
    drawn: list[dict[str, list[Any]]], name: str
) -> None:
    of_ranks = [of_rank[name] for of_rank in drawn]
    timeline, _, _, table = of_ranks[0]
    assert timeline.rows == [
        "rank 0 (pp 0, tp 0)",
        "rank 1 (pp 0, tp 1)",
        "rank 2 (pp 1, tp 0)",
        "rank 3 (pp 1, tp 1)",
    ]
    place, last = table.stage_to_rank, table.num_stages - 1
    crossed = [stage for stage in range(last) if place[stage] != place[stage + 1]]
    for rank, (drawn, unrecorded, spans, _) in enumerate(of_ranks):
        pp = rank // 2
        assert (drawn is not None, unrecorded) == (rank == 0, [])
        shown = [span for span in timeline.spans if span.row == rank]
        assert [span.kind for span in shown] == [span.kind for span in spans]
        work = [(s.stage, s.kind, s.microbatch) for s in shown if s.kind in WORK]
        assert work == [(a.stage, a.kind, a.microbatch) for a in table.compute(pp)]
        counts = Counter(span.kind for span in shown)
        # Activations that leave a stage of this rank, and gradients that leave it backwards.
        sent = sum((place[s] == pp) + (place[s + 1] == pp) for s in crossed)
        assert counts[SEND_TO] == counts[RECEIVE] == sent * table.num_microbatches
        # Tensor parallelism, within each action.
        assert counts[GATHER] >= len(work) / 2
        assert counts[REDUCE] >= len(work) / 2
        assert all(span.end >= span.start >= 0 for span in shown)
        # One clock for both: what is gathered for an action lies in its time.
        first = next(span for span in shown if span.kind == GATHER)
        within = [s for s in shown if s.kind in WORK and s.start - 1 <= first.start <= s.end + 1]
        assert within


def _open(place: Place, stage_to_rank: list[int]) -> list[tuple[str, int]]:
    """The messages of a rank: how, and to or from which rank."""
    found = []
    with open_world(place), pytest.MonkeyPatch.context() as patches:
        send, recv, batch = dist.send, dist.recv, dist.batch_isend_irecv

        def sending(tensor: Any, group: Any, group_dst: int) -> None:
            found.append(("send", group_dst))
            send(tensor, group=group, group_dst=group_dst)

        def receiving(tensor: Any, group: Any, group_src: int) -> None:
            found.append(("recv", group_src))
            recv(tensor, group=group, group_src=group_src)

        def together(operations: list[Any]) -> Any:
            found.extend((one.op.__name__, one.group_peer) for one in operations)
            return batch(operations)

        for name, stand_in in zip(
            ("send", "recv", "batch_isend_irecv"), (sending, receiving, together), strict=True
        ):
            patches.setattr(dist, name, stand_in)
        open_pairs(dist.group.WORLD, stage_to_rank, torch.device("cpu"))
    return found


def test_each_pair_of_neighbours_is_opened_once() -> None:
    """As NCCL needs; a V-shaped schedule has neighbours on one rank, and a loop a ring."""
    v_shaped = spawn(_open, 2, [0, 1, 1, 0])
    assert v_shaped[0] == [("send", 1), ("isend", 1), ("irecv", 1)]
    looped = spawn(_open, 3, [0, 1, 2, 0, 1, 2])
    singles = [[one for one in found if one[0] in ("send", "recv")] for found in looped]
    assert singles == [
        [("send", 1), ("send", 2)],
        [("recv", 0), ("send", 2)],
        [("recv", 0), ("recv", 1)],
    ]
    assert [len(found) for found in looped] == [6, 6, 6]

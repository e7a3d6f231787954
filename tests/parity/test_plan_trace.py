"""A traced step has the communication and the memory of a real one on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.allocator import peak_bounds
from tests.benchmarks.communication import PARALLELISM, make_job_config
from titanlite.config import JobConfig, make_config, resolve_job
from titanlite.plan.events import Communication, Memory, totals
from titanlite.plan.trace import trace_rank
from titanlite.ranks.launch import Place, run_ranks

CP, TP, PP, SHARD = (
    f"{axis}_degree"
    for axis in (
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "data_parallel_shard",
    )
)
RING = "context_parallel_rotate_method"
LAYOUT = "context_parallel_load_balancer"
WITH_CP: dict[str, dict[str, Any]] = {
    "cp4": {CP: 4, SHARD: 1},
    "cp4_contiguous": {CP: 4, SHARD: 1, LAYOUT: "none"},
    "cp4_allgather": {CP: 4, SHARD: 1, RING: "allgather"},
    "cp2_tp2": {CP: 2, TP: 2, SHARD: 1},
    "cp2_fsdp2": {CP: 2, SHARD: 2},
    "pp2_cp2": {PP: 2, CP: 2, SHARD: 1},
}
PLANS = [
    *PARALLELISM,
    *(f"{plan}+{mode}" for plan in ("tp4", "tp4_async", "fsdp4") for mode in ("full", "op")),
    *WITH_CP,
]


QUICK = ["ddp4", "hsdp2x2", "tp2_fsdp2", "tp4_async+op", "pp2_fsdp2", "pp2_cp2", "pp2_zbv"]


def config_of(plan: str) -> JobConfig:
    if plan in WITH_CP:
        training = {"dataset": "synthetic", "global_batch_size": 8, "local_batch_size": 4}
        return make_config(
            {
                "model": {"flavor": "debug"},
                "training": training,
                "parallelism": WITH_CP[plan],
                "activation_checkpoint": {"mode": "none"},
            }
        )
    return make_job_config(plan, microbatches=1 if "pp" in plan else 2)


def run_and_record(place: Place, configs: list[JobConfig]) -> list[tuple[Any, tuple[int, int]]]:
    """The communication of step 2 of real jobs, and bounds of the peak of a step."""
    from titanlite.job import build_job
    from titanlite.plan.recorder import Recorder
    from titanlite.plan.trace import axes_of_ranks
    from titanlite.ranks.world import open_world

    found = []
    with open_world(place) as world:
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            job.step()
            recorder = Recorder(axes_of_ranks(job), is_fake=False)
            with recorder:
                job.step()
            peak = peak_bounds(job.step)
            calls = [event for event in recorder.events if isinstance(event, Communication)]
            found.append((calls, peak))
    return found


Found = dict[str, list[tuple[list[Communication], tuple[int, int]]]]


def measure(plans: list[str]) -> Found:
    """For each plan what each rank of a real run has sent, and its peak."""
    configs = [config_of(plan) for plan in plans]
    of_ranks = run_ranks(run_and_record, 4, configs, timeout_seconds=280)
    return {plan: [of[index] for of in of_ranks] for index, plan in enumerate(plans)}


def check_plans(plans: list[str]) -> None:
    for plan, of_ranks in measure(plans).items():
        resolved = resolve_job(config_of(plan), 4)
        for rank in (0, 3):
            trace = trace_rank(resolved, rank)
            calls, (low, high) = of_ranks[rank]
            assert totals(trace.communications) == totals(calls), plan
            assert [told(c) for c in trace.communications] == [told(c) for c in calls], plan
            extra = trace.peak().num_bytes - sum(trace.held.values())
            assert 0.995 * low <= extra <= 1.005 * high, (plan, low, extra, high)
            sizes = dict(trace.sizes)
            for event in trace.events:
                if isinstance(event, Memory):
                    sizes[event.block] = event.num_bytes
            assert sum(sizes.values()) == sum(trace.sizes.values()), f"{plan}: memory is not freed"


def told(one: Communication) -> tuple[Any, ...]:
    return one.kind, one.axis, one.num_bytes, one.num_ranks, one.peer


def test_a_trace_is_a_run() -> None:
    check_plans(QUICK)


@pytest.mark.slow
def test_a_trace_of_any_plan_is_a_run() -> None:
    check_plans([plan for plan in PLANS if plan not in QUICK])

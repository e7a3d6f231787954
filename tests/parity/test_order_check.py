"""Under comm.mode = "debug", a rank that calls in another order is named before weights change."""

from typing import Any

import pytest
from training import debug_config

from titanlite.config import JobConfig, resolve_job
from titanlite.errors import OrderError
from titanlite.ranks.launch import Place, spawn

BAD_RANK = 2
DEBUG = {"comm": {"mode": "debug"}}
SHARDED = {"data_parallel_shard_degree": 4}
PLANS: dict[str, dict[str, Any]] = {
    "tp2_fsdp2": {
        "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2},
        "activation_checkpoint": {"mode": "full"},
    },
    "fsdp4": {"parallelism": SHARDED},
    "ddp4": {"parallelism": {"data_parallel_replicate_degree": 4}},
    "cp2_hsdp": {
        "parallelism": {"context_parallel_degree": 2, "data_parallel_replicate_degree": 2}
    },
    "zbv_tp2": {
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_schedule": "ZBVZeroBubble",
            "tensor_parallel_degree": 2,
        }
    },
}

QUICK = ["tp2_fsdp2"]


def swap_on_one_rank(job: Any) -> None:
    """Have a block exchange two values of one shape, on one rank the other way round."""
    import torch
    import torch.distributed as dist

    def share_first() -> None:
        dist.all_reduce(torch.ones(3))

    def share_second() -> None:
        dist.all_reduce(torch.ones(3))

    def exchange(module: Any, inputs: Any, output: Any) -> None:
        is_bad = job.world.rank == BAD_RANK
        for share in (share_second, share_first) if is_bad else (share_first, share_second):
            share()

    job.parts[0].get_submodule("layers.1").register_forward_hook(exchange)


def step_in_debug_mode(place: Place, configs: list[JobConfig]) -> list[str]:
    """Three good steps of each job, then a bad one of the first: what is said of it."""
    from titanlite.job import build_job
    from titanlite.modules.shards import local_part
    from titanlite.ranks.world import open_world

    said = []
    with open_world(place) as world:
        for config in configs:
            job = build_job(resolve_job(config, world.size), world)
            for _ in range(2):
                job.step()
            list(job.whole_parameters())
            job.step()
        job = build_job(resolve_job(configs[0], world.size), world)
        job.step()
        swap_on_one_rank(job)
        before = [local_part(p).clone() for p in job.trainer.parameters]
        try:
            job.step()
        except OrderError as error:
            said.append(str(error))
        after = [local_part(p) for p in job.trainer.parameters]
        assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    return said


@pytest.mark.parametrize("plans", [QUICK, pytest.param(list(PLANS), marks=pytest.mark.slow)])
def test_no_plan_is_accused_and_a_swap_is_named(plans):
    configs = [debug_config(PLANS[name], DEBUG) for name in plans]
    by_rank = spawn(step_in_debug_mode, 4, configs, timeout_seconds=120)
    (text,) = by_rank[0]
    assert all(said == [text] for said in by_rank)
    assert text.startswith(f"rank {BAD_RANK}: at collective ")
    assert "over the world it called all_reduce of 3 float32 at tests/parity/" in text
    assert text.endswith(" called them in the opposite order; this step did not change the weights")

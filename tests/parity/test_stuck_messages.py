"""A rank that sleeps while others wait for its messages, in a ring or a pipeline, is named."""

import threading
from typing import Any

import pytest
from training import debug_config

from titanlite.config import JobConfig, resolve_job
from titanlite.errors import RankError
from titanlite.ranks.launch import Place, spawn

TIMEOUT_SECONDS = 2
BAD_RANK = 1
PLANS = {
    "ring": (
        {"context_parallel_degree": 2},
        "cp",
        "titanlite/parallelize/context_parallel/rotation.py:",
    ),
    "1F1B": (
        {"pipeline_parallel_degree": 2},
        "pp",
        "titanlite/parallelize/pipeline_parallel/apply.py:",
    ),
    "ZBV": (
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        "pp",
        "titanlite/parallelize/pipeline_parallel/apply.py:",
    ),
}


def fall_asleep_in_a_block(place: Place, config: JobConfig) -> None:
    from titanlite.job import build_job
    from titanlite.ranks.world import open_world

    with open_world(place) as world:
        job = build_job(resolve_job(config, world.size), world)
        job.step()
        world.set_timeout(TIMEOUT_SECONDS)
        if world.rank == BAD_RANK:
            blocks = job.parts[0].get_submodule("layers")
            list(blocks.children())[-1].register_forward_pre_hook(sleep)
        job.step()


def sleep(module: Any, inputs: Any) -> None:
    threading.Event().wait()


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_the_rank_whose_message_is_missing_is_named(plan):
    parallelism, axis, site = PLANS[plan]
    config = debug_config({"parallelism": parallelism})
    with pytest.raises(RankError) as raised:
        spawn(fall_asleep_in_a_block, 2, config, timeout_seconds=60)
    said = f"{raised.value.rank_traceback}\n{raised.value}"
    assert raised.value.rank == BAD_RANK, said
    headline = (
        f"over {axis} (the world) with rank 0; rank 0 is waiting in it; rank 1 is at tests/parity/"
    )
    assert headline in str(raised.value), said
    assert f"called at {site}" in said, said
    assert "in sleep\n" in said, said

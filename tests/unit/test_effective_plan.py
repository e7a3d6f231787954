"""The effective plan of a job: what FSDP2 is active for, where it was not asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.config import make_config, resolve_job
from titanlite.job import build_job
from titanlite.ranks.world import World

NUM_RANKS = 4


@pytest.fixture
def world() -> Iterator[World]:
    """The first of four ranks; the others are not there, and its collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield World(0, NUM_RANKS, 0, NUM_RANKS, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("parallelism", "training", "requested", "active", "reason"),
    [
        (
            {"context_parallel_degree": 4},
            {},
            "off",
            "FSDP 4",
            "the 4 ranks of cp share one set of weights, so FSDP2 shards over them",
        ),
        (
            {"context_parallel_degree": 2, "data_parallel_shard_degree": 2},
            {},
            "FSDP 2",
            "FSDP 4",
            "the 2 ranks of cp share one set of weights, so FSDP2 shards over them",
        ),
        ({"data_parallel_shard_degree": 4}, {}, "FSDP 4", "FSDP 4", "4 units"),
        (
            {"tensor_parallel_degree": 4, "data_parallel_shard_degree": 1},
            {"mixed_precision_param": "bfloat16"},
            "off",
            "FSDP 1",
            "FSDP2 with one shard, for mixed precision",
        ),
    ],
)
def test_where_fsdp_is_active_for_another_reason_the_plan_says_so(
    world: World,
    parallelism: dict[str, int],
    training: dict[str, str],
    requested: str,
    active: str,
    reason: str,
) -> None:
    config = make_config(
        {
            "model": {"flavor": "debug"},
            "training": {"dataset": "synthetic", **training},
            "parallelism": parallelism,
            "activation_checkpoint": {"mode": "none"},
        }
    )
    job = build_job(resolve_job(config, NUM_RANKS), world)
    row = next(row for row in job.applied if row.feature == "data parallel")
    assert (row.requested, row.active) == (requested, active)
    assert row.note.startswith(reason)

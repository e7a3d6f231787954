"""The effective plan of a job: what FSDP2 is active for, where it was not asked for."""

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlite.config import JobConfig, resolve_job
from titanlite.job import build_job
from titanlite.mesh.device_mesh import build_meshes
from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.parallelize import ParallelPlan
from titanlite.parallelize.part import Part
from titanlite.parallelize.tensor_parallel.step import apply as tensor_parallel
from titanlite.parallelize.tensor_parallel.styles import NormLocal
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
    config = JobConfig.from_dict(
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


def test_plan_keys_without_a_module_are_listed(world: World) -> None:
    config = JobConfig.from_dict({"parallelism": {"tensor_parallel_degree": NUM_RANKS}})
    dims = ParallelDims(tp=NUM_RANKS)
    model = nn.ModuleDict({"norm": nn.LayerNorm(8)})
    plan = ParallelPlan(tensor_parallel={"norm": NormLocal(), "blocks.*.nrom": NormLocal()})
    part = Part(model, config, dims, build_meshes(dims, "cpu"), plan, None)
    with pytest.warns(UserWarning, match=r"'blocks\.\*\.nrom' matches no module of ModuleDict"):
        row = tensor_parallel(part)
    assert row.note.startswith("1 modules, ")
    assert row.note.endswith("; plan keys without a module: blocks.*.nrom")


def test_ddp_of_compiled_blocks_uses_the_optimizer_of_dynamo(world: World) -> None:
    degrees = {"data_parallel_replicate_degree": NUM_RANKS, "data_parallel_shard_degree": 1}
    for enable, expected in ((False, True), (True, "ddp_optimizer")):
        config = JobConfig.from_dict(
            {
                "model": {"flavor": "debug"},
                "training": {"dataset": "synthetic"},
                "parallelism": degrees,
                "compile": {"enable": enable, "backend": "eager"},
                "activation_checkpoint": {"mode": "none"},
            }
        )
        with torch._dynamo.config.patch(optimize_ddp=False):
            build_job(resolve_job(config, NUM_RANKS), world)
            assert torch._dynamo.config.optimize_ddp == expected

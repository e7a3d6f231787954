"""Degrees and coordinates, and how degrees are made up from a job and its number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titanlite.config import JobConfig, make_parallel_dims, resolve_job
from titanlite.errors import ConfigError
from titanlite.mesh.parallel_dims import (
    AXES,
    TABLE,
    ParallelDims,
    axes_of,
    axes_where,
    divisors,
    flat_name,
)

degrees = st.builds(ParallelDims, **{axis: st.integers(1, 4) for axis in AXES})


def test_axes_stand_outermost_first() -> None:
    assert AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert list(ParallelDims().degrees) == list(AXES)
    assert list(ParallelDims(tp=2).coordinates(1)) == list(AXES)


@given(degrees, st.data())
def test_rank_and_coordinates_are_inverse(dims: ParallelDims, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, dims.world_size - 1))
    assert dims.rank(**dims.coordinates(rank)) == rank


def test_tp_neighbours_are_next_to_each_other() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2)
    assert [dims.rank(tp=tp) for tp in range(2)] == [0, 1]
    assert [dims.rank(dp_shard=shard) for shard in range(2)] == [0, 2]
    assert [dims.rank(dp_replicate=replica) for replica in range(2)] == [0, 4]


@pytest.mark.parametrize(
    ("dims", "world_size", "dp", "fsdp", "words"),
    [
        (ParallelDims(), 1, 1, False, "one rank"),
        (ParallelDims(dp_shard=2, tp=2), 4, 2, True, "dp_shard 2 x tp 2"),
        (ParallelDims(dp_replicate=4), 4, 4, False, "dp_replicate 4"),
        (ParallelDims(dp_replicate=2, dp_shard=2), 4, 4, True, "dp_replicate 2 x dp_shard 2"),
        (ParallelDims(cp=2), 2, 1, True, "cp 2"),
        (ParallelDims(pp=3, tp=2), 6, 1, False, "pp 3 x tp 2"),
    ],
)
def test_sizes(dims: ParallelDims, world_size: int, dp: int, fsdp: bool, words: str) -> None:
    assert dims.world_size == world_size
    assert dims.dp == dp
    assert dims.fsdp_enabled is fsdp
    assert dims.describe() == words
    assert dims.axes_in_use == tuple(axis for axis in AXES if dims.degrees[axis] > 1)


def test_who_reads_what_and_who_counts_the_loss_follow_from_the_table() -> None:
    dims = ParallelDims(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    shares: dict[tuple[int, int], list[int]] = {}
    for rank in range(dims.world_size):
        share = dims.data_rank(rank), dims.token_rank(rank)
        shares.setdefault(share, []).append(rank)
    # Each share of the batch is with the ranks that differ in stage and part of the weights alone.
    assert sorted(shares) == [(data, tokens) for data in range(6) for tokens in range(2)]
    for ranks in shares.values():
        assert {(dims.coordinates(r)["pp"], dims.coordinates(r)["tp"]) for r in ranks} == {
            (stage, part) for stage in range(2) for part in range(2)
        }
        # On each stage one of them; which stage has a loss is the pipeline's to say.
        counting = [dims.coordinates(rank) for rank in ranks if dims.counts_loss(rank)]
        assert sorted((place["pp"], place["tp"]) for place in counting) == [(0, 0), (1, 0)]
    assert (dims.dp, dims.num_token_shards, dims.num_weight_shards) == (6, 2, 6)


def test_a_flattened_mesh_dimension_is_known_by_its_name() -> None:
    sharded = axes_where(weights="sharded")
    assert sharded == ("dp_shard", "cp")
    assert axes_of(flat_name(sharded)) == sharded
    assert axes_of("tp") == ("tp",)
    assert [axis.name for axis in TABLE if axis.weights == "replicated"] == ["dp_replicate"]


def test_what_is_outside_is_refused() -> None:
    dims = ParallelDims(tp=2)
    with pytest.raises(ValueError, match="rank 2 is outside a world of 2"):
        dims.coordinates(2)
    with pytest.raises(ValueError, match="position 2 is outside tp, whose degree is 2"):
        dims.rank(tp=2)
    with pytest.raises(ValueError, match="no mesh axis 'ep'"):
        dims.rank(ep=0)
    with pytest.raises(ValueError, match="degree of tp is 0"):
        ParallelDims(tp=0)


@given(st.integers(1, 500))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def job(**parallelism: int) -> Any:
    """A job whose model splits up to 3 ways and up to 8."""
    sizes = {"dim": 48, "num_heads": 24, "ffn_hidden_dim": 48, "vocab_size": 24}
    sizes["image_height"] = 24
    return JobConfig.from_dict(
        {"parallelism": parallelism, "model": sizes, "training": {"dataset": "synthetic"}}
    )


SHARD = "data_parallel_shard_degree"
REPLICATE = "data_parallel_replicate_degree"
TP = "tensor_parallel_degree"
REST, PRODUCT = "(or -1 for the remaining ranks)", "degrees that multiply to"


@pytest.mark.parametrize(
    ("parallelism", "world_size", "num_gpus", "expected"),
    [
        ({}, 1, 0, ParallelDims()),
        ({}, 4, 0, ParallelDims(dp_shard=4)),
        ({TP: 2}, 8, 0, ParallelDims(dp_shard=4, tp=2)),
        ({TP: 2, REPLICATE: 2}, 8, 0, ParallelDims(dp_replicate=2, dp_shard=2, tp=2)),
        ({TP: 2, SHARD: 2}, 4, 0, ParallelDims(dp_shard=2, tp=2)),
        # The job starts its own ranks.
        ({}, None, 0, ParallelDims()),
        ({TP: 2}, None, 0, ParallelDims(tp=2)),
        ({TP: 2, SHARD: 2}, None, 0, ParallelDims(dp_shard=2, tp=2)),
        ({TP: 2}, None, 8, ParallelDims(dp_shard=4, tp=2)),
        ({TP: 3}, None, 8, ParallelDims(dp_shard=2, tp=3)),
        ({TP: 8}, None, 4, ParallelDims(tp=8)),
    ],
)
def test_degrees_of_a_job(
    parallelism: dict[str, int], world_size: int | None, num_gpus: int, expected: ParallelDims
) -> None:
    assert make_parallel_dims(job(**parallelism), world_size, num_gpus) == expected


def test_a_shard_degree_of_minus_one_takes_the_other_ranks() -> None:
    jobs = [job(**{SHARD: -1, TP: tp}) for tp in (1, 2, 4, 8)]
    # As many ranks as the machine has GPUs, or as torchrun starts.
    assert [make_parallel_dims(one, None, num_gpus=8).dp_shard for one in jobs] == [8, 4, 2, 1]
    assert [make_parallel_dims(one, 8).dp_shard for one in jobs] == [8, 4, 2, 1]


def test_gpus_do_not_count_on_cpu() -> None:
    config = JobConfig.from_dict({"job": {"device": "cpu"}})
    assert make_parallel_dims(config, None, num_gpus=8) == ParallelDims()


@pytest.mark.parametrize(
    ("degrees", "num_ranks", "key", "needed", "given"),
    [
        ({TP: 3}, 4, TP, "tp 3 needs a multiple of 3 ranks", "2 or 4, or start 3 or 6 ranks"),
        ({TP: 4}, 2, TP, "tp 4 needs a multiple of 4 ranks", "2, or start 4 ranks"),
        # 5 and 10 divide the 10 ranks, but not the model.
        ({TP: 3}, 10, TP, "tp 3 needs a multiple of 3 ranks", "2, or start 9 or 12 ranks"),
        (
            {REPLICATE: 3, TP: 2},
            8,
            REPLICATE,
            "dp_replicate 3 x tp 2 needs a multiple of 6 ranks",
            "2 or 4, or start 6 or 12 ranks",
        ),
        (
            {REPLICATE: 3, TP: 8},
            10,
            "",
            "dp_replicate 3 x tp 8 needs a multiple of 24 ranks",
            f"{PRODUCT} 10, or start 24 ranks",
        ),
        ({SHARD: 4}, 3, SHARD, "dp_shard 4 needs 4 ranks", f"3 {REST}, or start 4 ranks"),
        ({SHARD: 1, TP: 2}, 4, SHARD, "tp 2 needs 2 ranks", f"2 {REST}, or start 2 ranks"),
        ({SHARD: 1, TP: 4}, 2, TP, "tp 4 needs 4 ranks", "2, or start 4 ranks"),
        ({SHARD: 1}, 2, SHARD, "every degree is 1", f"2 {REST}, or start 1 rank"),
        ({SHARD: 2}, 1, SHARD, "dp_shard 2 needs 2 ranks", f"1 {REST}, or start 2 ranks"),
        ({SHARD: 2, TP: 3}, 4, TP, "dp_shard 2 x tp 3 needs 6 ranks", "2, or start 6 ranks"),
        (
            {SHARD: 3, TP: 3},
            4,
            "",
            "dp_shard 3 x tp 3 needs 9 ranks",
            f"{PRODUCT} 4, or start 9 ranks",
        ),
        (
            {SHARD: 2, TP: 2},
            1,
            "",
            "dp_shard 2 x tp 2 needs 4 ranks",
            f"{PRODUCT} 1, or start 4 ranks",
        ),
        (
            {SHARD: -1, TP: 2, "context_parallel_degree": 2},
            1,
            "",
            "cp 2 x tp 2 needs a multiple of 4 ranks",
            f"{PRODUCT} 1, or start 4 ranks",
        ),
    ],
)
def test_degrees_that_do_not_make_up_the_world(
    degrees: dict[str, int], num_ranks: int, key: str, needed: str, given: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make_parallel_dims(job(**degrees), num_ranks)
    there = "there is 1" if num_ranks == 1 else f"there are {num_ranks}"
    there += " ranks" if needed == "every degree is 1" else ""
    at = f"parallelism.{key}" if key else "parallelism"
    assert caught.value.problems == (f"{at}: {needed}, but {there}; give {given}",)


def test_batch_is_checked_once_the_ranks_are_known() -> None:
    config = JobConfig.from_dict({"training": {"global_batch_size": 24}})
    resolve_job(config, 3)
    with pytest.raises(ConfigError) as caught:
        resolve_job(config, 2)
    assert caught.value.problems == (
        "training.global_batch_size: 24 is not a multiple of 16 (local_batch_size 8 x "
        "data-parallel degree 2); give 16 or 32",
    )

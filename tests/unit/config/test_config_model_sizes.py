"""Counts of the image transformer's parameters and FLOPs, and what its sizes can be split into."""

from dataclasses import replace

import pytest

from titanlite.mesh.parallel_dims import ParallelDims
from titanlite.models.image_transformer.config import FLAVORS
from titanlite.registry import DATASETS

CIFAR = FLAVORS["cifar"]


def test_cifar_counts() -> None:
    assert CIFAR.seq_len == 3_072
    assert CIFAR.num_parameters == 9_069_568
    assert CIFAR.flops_per_token(3_072) == 204_916_224


def test_embeddings_count() -> None:
    assert replace(CIFAR, dim=128).num_embedding_parameters == 41_344


def test_grouped_queries_save_parameters() -> None:
    config = replace(CIFAR, num_heads=8, num_kv_heads=2)
    saved = CIFAR.num_layers * 2 * 256 * (8 - 2) * (256 // 8)
    assert CIFAR.num_parameters - config.num_parameters == saved


def test_kv_heads_follow_heads() -> None:
    assert replace(CIFAR, num_heads=8).kv_heads == 8
    assert replace(CIFAR, num_heads=8, num_kv_heads=4).kv_heads == 4


@pytest.mark.parametrize(("flavor", "dataset"), [("digits", "digits"), ("cifar", "photos")])
def test_flavor_fits_its_data(flavor: str, dataset: str) -> None:
    config, info = FLAVORS[flavor], DATASETS[dataset]
    assert config.vocab_size == info.vocab_size
    for axis in ("height", "width", "channels"):
        assert getattr(info, axis) in (getattr(config, f"image_{axis}"), None)


@pytest.mark.parametrize(
    ("flavor", "legal"), [("digits", [1, 2, 4]), ("cifar", [1, 2]), ("debug", [1, 2, 4, 8])]
)
def test_degrees_that_split_a_flavor(flavor: str, legal: list[int]) -> None:
    config = FLAVORS[flavor]
    assert [
        tp for tp in range(1, 65) if not config.problems(ParallelDims(tp=tp), config.seq_len)
    ] == legal


def test_other_degrees_split_anything() -> None:
    assert not FLAVORS["digits"].problems(ParallelDims(dp_replicate=3, dp_shard=7), 64)


def test_problems_name_key_and_cure() -> None:
    config = replace(FLAVORS["digits"], num_heads=5, num_kv_heads=2)
    assert config.problems(ParallelDims(), 64) == [
        ("model.num_heads", "5 does not divide model.dim 96; give 4 or 6"),
        ("model.num_kv_heads", "2 does not divide model.num_heads 5; give 1 or 5"),
    ]
    names = FLAVORS["debug"].module_names
    assert names == ("embeddings", "layers.0", "layers.1", "norm", "output")

"""Keyed random numbers: their distribution, what they depend on, and what they do not."""

import pytest
import torch

from titanlite.data.sampler import GlobalBatchSampler, iterate_once
from titanlite.modules import keyed
from titanlite.modules.keyed import keyed_normal, keyed_uniform, sample_keys

KEYS = sample_keys(torch.arange(64))


def squares(counter: int, key: int) -> int:
    """The reference code of arXiv 2004.06278, in Python's integers."""
    mask = 2**64 - 1
    x = y = counter * key & mask
    z = y + key & mask
    for added in (y, z, y):
        x = x * x + added & mask
        x = x >> 32 | x << 32 & mask
    return (x * x + z & mask) >> 32


def test_the_generator_is_squares() -> None:
    for key in (0x548C9DECBCE65297, 0xC58D7A1E3FB29647 - 2**64, 1):
        words = keyed._squares(torch.arange(99), torch.tensor([key]))
        assert words.tolist() == [squares(i, key % 2**64) for i in range(99)]


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    x = keyed_normal(KEYS, (3, 1001), dtype=torch.float64)
    assert x.shape == (64, 3, 1001)
    deviation = x.numel() ** -0.5
    for power, (mean, spread) in enumerate([(0, 1), (1, 2**0.5), (0, 15**0.5), (3, 96**0.5)], 1):
        assert abs((x**power).mean() - mean) < 5 * spread * deviation
    # Over each dimension by itself too.
    for dims in [(1, 2), (0, 1)]:
        of_each = x.mean(dims)
        assert of_each.abs().max() < 5.5 * (x.numel() / of_each.numel()) ** -0.5
    assert 4 < x.abs().max() < 6


def test_uniform_numbers_fill_the_interval_below_one() -> None:
    x = keyed_uniform(KEYS, (4096,))
    counts = torch.histc(x, 64, 0, 1)
    expected = x.numel() / 64
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 20 < chi_square < 130  # 63 degrees of freedom
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = keyed_uniform(KEYS, (4096,), dtype=dtype)
        assert x.dtype == dtype
        assert 0 <= x.min() < 0.01
        assert 0.99 < x.max() < 1


def test_keys_names_seeds_and_places_give_independent_numbers() -> None:
    x = keyed_normal(KEYS, (1000,))
    others = {
        "another name": keyed_normal(KEYS, (1000,), "time"),
        "another seed": keyed_normal(sample_keys(torch.arange(64), 1), (1000,)),
        "validation": keyed_normal(sample_keys(torch.arange(64), None), (1000,)),
        "the next epoch": keyed_normal(sample_keys(torch.arange(64) + 1498), (1000,)),
        "a run's end": keyed_normal(sample_keys(torch.arange(64) + 2**40), (1000,)),
        "the next sample": x.roll(1, 0),
        "the next element": x.roll(1, 1),
        "its pair": x.unflatten(1, (500, 2)).flip(2).flatten(1),
    }
    for name, other in others.items():
        assert abs((x * other).mean()) < 5 * x.numel() ** -0.5, name
        assert abs((x**2 * other**2).mean() - 1) < 25 * x.numel() ** -0.5, name


def test_a_sample_has_its_numbers_in_any_batch_shape_and_dtype() -> None:
    x = keyed_normal(KEYS, (3, 5))
    assert torch.equal(keyed_normal(KEYS[10:12], (3, 5)), x[10:12])
    assert torch.equal(keyed_normal(KEYS[7], (3, 5)), x[7])
    assert torch.equal(keyed_normal(KEYS.flip(0), (3, 5)), x.flip(0))
    wide = keyed_normal(KEYS, (3, 5), dtype=torch.float64)
    assert (x - wide).abs().max() < 1e-5
    assert torch.equal(keyed_normal(KEYS, (3, 5), dtype=torch.bfloat16), x.bfloat16())
    uniform = keyed_uniform(KEYS, (2,))
    assert torch.equal(keyed_uniform(KEYS, (2,), dtype=torch.float64).float(), uniform)
    assert keyed_uniform(KEYS).shape == KEYS.shape
    assert keyed_normal(KEYS.to("meta"), (3, 5)).shape == (64, 3, 5)


def test_a_part_of_the_sequence_has_its_part_of_the_numbers() -> None:
    whole = keyed_normal(KEYS, (3,), positions=torch.arange(16))
    assert whole.shape == (64, 16, 3)
    held = torch.tensor([0, 1, 14, 15])
    assert torch.equal(keyed_normal(KEYS, (3,), positions=held), whole[:, held])
    of_each = held.expand(64, -1)
    assert torch.equal(keyed_normal(KEYS, (3,), positions=of_each), whole[:, held])
    assert whole.flatten().unique().numel() > 0.99 * whole.numel()


def test_a_compiled_graph_draws_the_same_numbers() -> None:
    def draw(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keyed_normal(keys, (3,), "a"), keyed_uniform(keys, (3,), "b")

    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    for own, expected in zip(compiled(KEYS), draw(KEYS), strict=True):
        assert torch.equal(own, expected)


class Images:
    """Samples without tokens, and with them."""

    num_samples = 6

    def __init__(self, *, has_tokens: bool) -> None:
        self._name = "tokens" if has_tokens else "image"

    def sample(self, index: int) -> dict[str, torch.Tensor]:
        return {self._name: torch.tensor([index, 0]), "targets": torch.tensor([0, 0])}


@pytest.mark.parametrize("has_tokens", [True, False])
def test_every_batch_has_the_keys_of_its_samples(has_tokens: bool) -> None:
    images = Images(has_tokens=has_tokens)
    fields = {"tokens" if has_tokens else "image": 0, "targets": 0}

    def keys_of(seed: int, dp: int = 1, local: int = 4) -> list[torch.Tensor]:
        samplers = [GlobalBatchSampler(images, dp, r, local, fields, seed) for r in range(dp)]
        return [
            torch.cat([batch["sample_keys"] for s in samplers for batch in s.draw(4)])
            for _ in range(4)
        ]

    steps = keys_of(3)
    # Of the run's samples, on through the epochs, under every split of the batch.
    assert torch.equal(torch.cat(steps), sample_keys(torch.arange(16), 3))
    assert len(torch.cat(steps).unique()) == 16
    assert all(map(torch.equal, steps, keys_of(3, dp=2, local=1)))
    assert not any(map(torch.equal, steps, keys_of(4)))
    validation = iterate_once(images, local_batch_size=4, dp_degree=1, dp_rank=0, fields=fields)
    keys = torch.cat([batch["sample_keys"] for batch in validation])
    assert torch.equal(keys[:6], sample_keys(torch.arange(6), None))

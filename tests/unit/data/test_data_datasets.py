"""Data sets: samples depend only on the index, splits are disjoint, and tokens are pixels."""

import dataclasses

import numpy as np
import pytest
import torch

from titanlite.data.catalog import DATASETS
from titanlite.data.images.photos import load_photo_regions, load_photos
from titanlite.data.images.pixels import pixels_to_tokens
from titanlite.data.spec import Dataset, DatasetSpec
from titanlite.errors import ConfigError

SHAPES = {
    "digits": {"height": 8, "width": 8, "channels": 1, "vocab_size": 17},
    "photos": {"height": 32, "width": 32, "channels": 3, "vocab_size": 256},
    "synthetic": {"height": 6, "width": 5, "channels": 2, "vocab_size": 11},
}


def build(name: str, split: str = "train", seed: int = 0, **changes: int) -> Dataset:
    return DATASETS[name].builder(split=split, seed=seed, **{**SHAPES[name], **changes})


def rows(dataset: Dataset, count: int, first: int = 0) -> torch.Tensor:
    return torch.stack([dataset.sample(i) for i in range(first, first + count)])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_samples_are_sequences_of_tokens_of_the_vocabulary(name: str, split: str) -> None:
    shape = SHAPES[name]
    tokens = rows(build(name, split), 40)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (40, shape["channels"] * shape["height"] * shape["width"])
    assert tokens.min() >= 0
    assert tokens.max() < shape["vocab_size"]
    assert len(tokens.unique(dim=0)) == 40


@pytest.mark.parametrize("name", SHAPES)
def test_a_sample_depends_on_seed_and_index_alone(name: str) -> None:
    forward = build(name)
    ahead = [forward.sample(i) for i in range(0, 5000, 250)]
    backward = build(name)
    behind = [backward.sample(i) for i in reversed(range(0, 5000, 250))]
    torch.manual_seed(7)
    np.random.seed(7)
    again = [forward.sample(i) for i in range(0, 5000, 250)]
    assert all(torch.equal(a, b) for a, b in zip(ahead, reversed(behind), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ahead, again, strict=True))
    other = build(name, seed=1)
    assert not torch.equal(rows(forward, 20), rows(other, 20))


# The streams must stay stable: changing them would change every run that users compare with.
def test_the_streams_stay_as_they_are() -> None:
    assert build("digits").sample(0)[:8].tolist() == [0, 0, 3, 8, 11, 13, 14, 0]
    assert build("photos").sample(0)[:8].tolist() == [119, 96, 97, 91, 48, 49, 38, 52]
    assert build("synthetic").sample(0)[:8].tolist() == [9, 9, 10, 10, 10, 9, 9, 9]


def test_each_epoch_of_digits_holds_every_image_once_in_another_order() -> None:
    digits = build("digits")
    count = digits.num_samples
    assert count == 1498
    first, second = rows(digits, count), rows(digits, count, first=count)
    assert not torch.equal(first, second)
    as_multiset = [sorted(map(tuple, epoch.tolist())) for epoch in (first, second)]
    assert as_multiset[0] == as_multiset[1]


def test_validation_keeps_one_order_whatever_the_seed() -> None:
    for name in SHAPES:
        validation = build(name, "validation")
        count = validation.num_samples
        assert count is not None
        assert torch.equal(validation.sample(3), validation.sample(3 + count))
        assert torch.equal(rows(validation, 20), rows(build(name, "validation", seed=9), 20))


def test_digit_splits_share_no_image_and_cover_the_set() -> None:
    from sklearn.datasets import load_digits

    train, validation = build("digits"), build("digits", "validation")
    assert (train.num_samples, validation.num_samples) == (1498, 299)
    parts = [*rows(train, 1498).tolist(), *rows(validation, 299).tolist()]
    whole = load_digits().images.reshape(1797, 64).astype(int).tolist()
    assert sorted(parts) == sorted(whole)


def test_photos_are_those_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_sample_images

    for own, known in zip(load_photos(), load_sample_images().images, strict=True):
        assert np.array_equal(own, known)


def test_photo_regions_are_disjoint_pixel_by_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every pixel holds its own number, so a region shows where it was cut.
    numbered = np.arange(2 * 427 * 640 * 3).reshape(2, 427, 640, 3)
    monkeypatch.setattr("titanlite.data.images.photos.load_photos", lambda: list(numbered))
    train, validation = (
        np.concatenate([region.ravel() for region in load_photo_regions(split)])
        for split in ("train", "validation")
    )
    assert len(np.intersect1d(train, validation)) == 0
    assert np.array_equal(np.sort(np.concatenate([train, validation])), numbered.ravel())


@pytest.mark.parametrize("split", ["train", "validation"])
def test_photo_samples_are_cut_from_their_split(split: str) -> None:
    regions = [region.astype(np.int64) for region in load_photo_regions(split)]
    dataset = build("photos", split)
    for i in range(0, 100, 9):
        crop = dataset.sample(i).reshape(3, 32, 32).permute(1, 2, 0).numpy()
        assert any(is_crop_of(crop, region) for region in regions)


def is_crop_of(crop: np.ndarray, region: np.ndarray) -> bool:
    height, width = crop.shape[:2]
    corners = (region[: -height + 1, : -width + 1] == crop[0, 0]).all(-1)
    return any(
        np.array_equal(region[r : r + height, c : c + width], crop) for r, c in np.argwhere(corners)
    )


def test_validation_tiles_of_the_photos_do_not_overlap() -> None:
    validation = build("photos", "validation")
    assert validation.num_samples == 2 * 2 * (427 // 32) * (64 // 32)
    areas = sum(region.shape[0] * region.shape[1] for region in load_photo_regions("validation"))
    assert validation.num_samples * 32 * 32 <= areas
    assert len(rows(validation, 104).unique(dim=0)) == 104


def test_random_crops_reach_the_edges_of_their_regions() -> None:
    narrow = build("photos", height=426, width=255)
    corners = {tuple(narrow.sample(i)[:4].tolist()) for i in range(64)}
    # 4 regions with 2 x 2 positions each, minus positions that start with the same tokens.
    assert len(corners) > 8


def test_a_crop_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build("photos", "validation", height=500, width=65)
    assert caught.value.problems == (
        "model.image_height: 500 is larger than the validation part of the photographs; "
        "use at most 427",
        "model.image_width: 65 is larger than the validation part of the photographs; "
        "use at most 64",
    )


def test_a_data_set_is_registered_under_a_name_of_its_own() -> None:
    own = DatasetSpec("own", "numbers", build=lambda **arguments: None)
    DATASETS.add(own)
    DATASETS.add(own)
    assert DATASETS["own"] is own
    with pytest.raises(ValueError, match="data set named 'digits' is already registered"):
        DATASETS.add(dataclasses.replace(own, name="digits"))


def test_the_catalogue_says_what_the_data_sets_are() -> None:
    for name, shape in SHAPES.items():
        info = DATASETS[name]
        for key, value in shape.items():
            assert getattr(info, key) in (value, None)


def test_tokens_are_planar() -> None:
    pixels = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(1, 2, 2, 3)
    tokens = pixels_to_tokens(pixels, levels=256, channels=3, vocab_size=256)
    assert tokens.reshape(-1).tolist() == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


def test_color_becomes_gray_by_luma_and_gray_color_by_repetition() -> None:
    colors = np.array([[[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]]], dtype=np.uint8)
    gray = pixels_to_tokens(colors, levels=256, channels=1, vocab_size=256)
    assert gray.reshape(-1).tolist() == [76, 150, 29, 255]
    back = pixels_to_tokens(gray.reshape(1, 1, 4, 1), levels=256, channels=3, vocab_size=256)
    assert back.reshape(3, 4).tolist() == [[76, 150, 29, 255]] * 3
    with pytest.raises(ConfigError, match=r"^model.image_channels: 2 cannot be made"):
        pixels_to_tokens(colors, levels=256, channels=2, vocab_size=256)


def test_a_smaller_vocabulary_quantises_and_a_larger_one_keeps_the_values() -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    few = pixels_to_tokens(ramp, levels=256, channels=1, vocab_size=8).reshape(-1)
    assert np.bincount(few).tolist() == [32] * 8
    assert np.array_equal(np.sort(few), few)
    many = pixels_to_tokens(ramp, levels=256, channels=1, vocab_size=320).reshape(-1)
    assert np.array_equal(many, np.arange(256))


def test_synthetic_patterns_can_be_learned() -> None:
    # Within a row the wave is linear, so the last two pixels mostly determine the next one: this
    # rule is right far more often than chance.
    shape = {"height": 16, "width": 16, "channels": 1, "vocab_size": 64}
    images = rows(build("synthetic", **shape), 200).reshape(200, 16, 16)
    guess = 2 * images[:, :, 1:-1] - images[:, :, :-2]
    near = ((images[:, :, 2:] - guess).abs() <= 1).double().mean()
    assert near > 0.6

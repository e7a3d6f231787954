"""Where a data set comes by its name: `build_dataset("digits", ...)`.

Every data set is a function from a global sample index to a sequence of tokens. It has no place
to be at and no process to belong to, which is what lets every plan read the same data.
"""

from __future__ import annotations

from typing import Protocol

import torch

from titanlite.data.catalog import CATALOG
from titanlite.errors import ConfigError


class ImageDataset(Protocol):
    """Images as token sequences, by global sample index."""

    @property
    def num_samples(self) -> int | None:
        """Images in one epoch; None where the samples are endless, as random crops are."""

    def sample(self, index: int) -> torch.Tensor:
        """Sample `index` >= 0 as int64 [channels * height * width], planar.

        A pure function of (seed, index). Indices of a finite training set run on over epochs,
        each in an order of its own; a validation set repeats in one order.
        """


def build_dataset(
    name: str,
    *,
    path: str = "",
    split: str = "train",
    seed: int,
    height: int,
    width: int,
    channels: int,
    vocab_size: int,
    path_key: str = "training.dataset_path",
) -> ImageDataset:
    """The data set `name` of the catalogue, as images of height x width x channels.

    `split` is "train" or "validation"; the two share no image, and validation is finite and does
    not depend on `seed`. Raises ConfigError for an unknown name, for a shape that the data set
    cannot give, and, naming `path_key`, for missing or damaged files.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}, not 'train' or 'validation'")
    # Each data set's module is imported only where it is asked for: what they read with is heavy.
    if name == "digits":
        from titanlite.data import digits

        _check_size(name, height, width, digits.HEIGHT, digits.WIDTH)
        return digits.build_digits(split, seed=seed, channels=channels, vocab_size=vocab_size)
    if name == "photos":
        from titanlite.data.photos import build_photos

        return build_photos(
            split,
            seed=seed,
            height=height,
            width=width,
            channels=channels,
            vocab_size=vocab_size,
        )
    if name == "cifar10":
        from titanlite.data import cifar10

        _check_size(name, height, width, cifar10.HEIGHT, cifar10.WIDTH)
        return cifar10.build_cifar10(
            path, split, seed=seed, channels=channels, vocab_size=vocab_size, path_key=path_key
        )
    if name == "synthetic":
        from titanlite.data.synthetic import build_synthetic

        return build_synthetic(
            split,
            seed=seed,
            height=height,
            width=width,
            channels=channels,
            vocab_size=vocab_size,
        )
    key = path_key.replace("_path", "")
    raise ConfigError(f"{key}: no data set is called {name!r}; use one of {', '.join(CATALOG)}")


def first_pixel_distribution(
    dataset: ImageDataset, vocab_size: int, *, max_samples: int = 2048
) -> torch.Tensor:
    """How often each token is an image's first: float64 [vocab_size], sums to 1.

    Nothing before the first pixel predicts it, so sampling an image starts with a draw from here.
    Reads the first `max_samples` samples, or the whole set where it is smaller.
    """
    count = max_samples
    if dataset.num_samples is not None:
        count = min(count, dataset.num_samples)
    first = torch.stack([dataset.sample(i)[0] for i in range(count)])
    return torch.bincount(first, minlength=vocab_size).double() / count


def _check_size(name: str, height: int, width: int, own_height: int, own_width: int) -> None:
    problems = [
        f"model.image_{side}: {name} has images of {own_height}x{own_width}, not {size}; use {own}"
        for side, size, own in (("height", height, own_height), ("width", width, own_width))
        if size != own
    ]
    if problems:
        raise ConfigError(*problems)

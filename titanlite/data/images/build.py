"""Build an image data set by name: `build_dataset("digits", ...)`.

Every data set is a function from a global sample index to a sequence of tokens. It has no read
position and does not depend on the rank, so all plans read the same data.
"""

from __future__ import annotations

from titanlite.data.spec import Dataset
from titanlite.errors import ConfigError


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
) -> Dataset:
    """The data set `name`, as images of height x width x channels.

    `split` is "train" or "validation"; the two share no image, and validation is finite and does
    not depend on `seed`. Raises ConfigError for a shape that the data set does not have, and for
    missing or damaged files, with the name of `path_key`.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is {split!r}, not 'train' or 'validation'")
    # Import each module only when it is needed: they depend on slow imports.
    if name == "digits":
        from titanlite.data.images import digits

        _check_size(name, height, width, digits.HEIGHT, digits.WIDTH)
        return digits.build_digits(split, seed=seed, channels=channels, vocab_size=vocab_size)
    if name == "photos":
        from titanlite.data.images.photos import build_photos

        return build_photos(
            split,
            seed=seed,
            height=height,
            width=width,
            channels=channels,
            vocab_size=vocab_size,
        )
    if name == "cifar10":
        from titanlite.data.images import cifar10

        _check_size(name, height, width, cifar10.HEIGHT, cifar10.WIDTH)
        return cifar10.build_cifar10(
            path, split, seed=seed, channels=channels, vocab_size=vocab_size, path_key=path_key
        )
    if name == "synthetic":
        from titanlite.data.images.synthetic import build_synthetic

        return build_synthetic(
            split,
            seed=seed,
            height=height,
            width=width,
            channels=channels,
            vocab_size=vocab_size,
        )
    raise ValueError(f"there is no image data set {name!r}")


def _check_size(name: str, height: int, width: int, own_height: int, own_width: int) -> None:
    problems = [
        f"model.image_{side}: {name} has images of {own_height}x{own_width}, not {size}; use {own}"
        for side, size, own in (("height", height, own_height), ("width", width, own_width))
        if size != own
    ]
    if problems:
        raise ConfigError(*problems)

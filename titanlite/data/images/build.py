"""Build an image data set by name: `build_dataset("digits", ...)`.

Every data set is a function from a global sample index to a sequence of tokens. It has no read
position and does not depend on the rank, so all plans read the same data.
"""

from __future__ import annotations

from titanlite.data.spec import Dataset
from titanlite.errors import ConfigError
from titanlite.registry import load

# Each module is imported only when it is needed: they depend on slow imports.
BUILDERS = {
    "digits": "titanlite.data.images.digits:build_digits",
    "photos": "titanlite.data.images.photos:build_photos",
    "cifar10": "titanlite.data.images.cifar10:build_cifar10",
    "synthetic": "titanlite.data.images.synthetic:build_synthetic",
}
# The height and width of sets whose images have one size.
SIDES = {"digits": 8, "cifar10": 32}


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
    of_files = {"path": path, "path_key": path_key} if name == "cifar10" else {}
    of_size = {"height": height, "width": width}
    if side := SIDES.get(name):
        problems = [
            f"model.image_{key}: {name} has images of {side}x{side}, not {size}; use {side}"
            for key, size in of_size.items()
            if size != side
        ]
        if problems:
            raise ConfigError(*problems)
        of_size = {}
    build = load(BUILDERS[name])
    return build(split, seed=seed, channels=channels, vocab_size=vocab_size, **of_size, **of_files)

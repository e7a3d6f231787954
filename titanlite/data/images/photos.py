"""Crops of the two photographs bundled with scikit-learn (427 x 640, RGB).

Validation reads fixed tiles of the left fifth of each half of each picture; training reads random
crops of the rest. No pixel is in both, and two strips per picture resemble the rest well enough.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image

from titanlite.data.images.packaged import packaged_file
from titanlite.data.images.pixels import pixels_to_tokens
from titanlite.data.keyed_random import CROP, permutation, random_words
from titanlite.data.stored import StoredSequences
from titanlite.errors import ConfigError

LEVELS = 256


class RandomCrops:
    """Endless crops of `height` x `width` at random positions keyed by (seed, index).

    Each of `regions` is [channels, rows, columns] uint8 tokens, at least as large as a crop. The
    region of a crop is drawn first, then its position in the region.
    """

    num_samples = None

    def __init__(self, regions: list[np.ndarray], *, height: int, width: int, seed: int) -> None:
        self._regions = regions
        self._height, self._width, self._seed = height, width, seed

    def sample(self, index: int) -> torch.Tensor:
        choice, row, column = (int(w) for w in random_words(self._seed, index, CROP, 3))
        region = self._regions[choice % len(self._regions)]
        row %= region.shape[1] - self._height + 1
        column %= region.shape[2] - self._width + 1
        crop = region[:, row : row + self._height, column : column + self._width]
        return torch.from_numpy(crop.astype(np.int64).reshape(-1))


def load_photos() -> list[np.ndarray]:
    """The two photographs, [427, 640, 3] uint8 each."""
    photos = []
    for name in ("china.jpg", "flower.jpg"):
        with Image.open(packaged_file(f"images/{name}")) as file:
            photos.append(np.asarray(file.convert("RGB")))
    return photos


def load_photo_regions(split: str) -> list[np.ndarray]:
    """The regions of a split, [rows, columns, 3] uint8, two per picture; validation: 64 columns."""
    regions = []
    for picture in load_photos():
        for half in np.array_split(picture, 2, axis=1):
            border = half.shape[1] // 5
            regions.append(half[:, :border] if split == "validation" else half[:, border:])
    return regions


def build_photos(
    split: str, *, seed: int, height: int, width: int, channels: int, vocab_size: int, **_: Any
) -> RandomCrops | StoredSequences:
    """Random crops for training, or the fixed tiles for validation, in a fixed shuffled order.

    Raises ConfigError if a crop of `height` x `width` does not fit into the split's regions.
    """
    regions = load_photo_regions(split)
    max_height = min(region.shape[0] for region in regions)
    max_width = min(region.shape[1] for region in regions)
    problems = [
        f"model.image_{name}: {size} is larger than the {split} part of the photographs; "
        f"use at most {limit}"
        for name, size, limit in (("height", height, max_height), ("width", width, max_width))
        if size > limit
    ]
    if problems:
        raise ConfigError(*problems)
    planes = [
        pixels_to_tokens(region, levels=LEVELS, channels=channels, vocab_size=vocab_size)
        for region in regions
    ]
    if split == "train":
        return RandomCrops(planes, height=height, width=width, seed=seed)
    tiles = np.concatenate([_tiles(plane, height, width) for plane in planes])
    # Shuffled with a fixed seed, so that the first few are not all sky.
    return StoredSequences(tiles[permutation(0, 0, len(tiles))])


def _tiles(plane: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cut [channels, rows, columns] into whole tiles [N, channels, height, width]."""
    channels, rows, columns = plane.shape
    down, across = rows // height, columns // width
    whole = plane[:, : down * height, : across * width]
    grid = whole.reshape(channels, down, height, across, width)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, channels, height, width)

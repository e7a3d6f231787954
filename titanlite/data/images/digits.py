"""The 1,797 handwritten digits bundled with scikit-learn: 8x8, one channel, values 0..16.

Every sixth image is held out for validation, so both splits cover the whole file evenly.
Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.
"""

import gzip
from typing import Any

import numpy as np

from titanlite.data.images.packaged import packaged_file
from titanlite.data.images.pixels import pixels_to_tokens
from titanlite.data.stored import StoredSequences

LEVELS = 17
HEIGHT = WIDTH = 8
_HOLD_OUT_EVERY = 6


def load_digit_images(split: str) -> np.ndarray:
    """The images of a split, [N, 8, 8, 1] uint8, values 0..16: 1,498 train, 299 validation."""
    # One row per image: its 64 pixels, then the digit that it shows.
    with gzip.open(packaged_file("data/digits.csv.gz"), "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, dtype=np.uint8, delimiter=",")
    pixels = rows[:, :-1].reshape(-1, HEIGHT, WIDTH, 1)
    held_out = np.arange(len(pixels)) % _HOLD_OUT_EVERY == _HOLD_OUT_EVERY - 1
    return pixels[held_out if split == "validation" else ~held_out]


def build_digits(
    split: str, *, seed: int, channels: int, vocab_size: int, **_: Any
) -> StoredSequences:
    """The digits as tokens; each training epoch is shuffled by (seed, epoch)."""
    tokens = pixels_to_tokens(
        load_digit_images(split), levels=LEVELS, channels=channels, vocab_size=vocab_size
    )
    return StoredSequences(tokens, shuffle_seed=seed if split == "train" else None)
